"""A batch of a step, and the micro-batches that a schedule makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, attach, part_of
from fivefold.parallel.intercept import Share
from fivefold.parallel.pipeline.check import check
from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.pipeline.schedules import make
from fivefold.parallel.trees import map_tensors

__all__ = ["Batch", "Schedules", "some_rows"]


@dataclass(frozen=True)
class Batch:
    """This rank's inputs of a step, and which samples they are."""

    call: Callable[..., Any]
    inputs: Any
    share: Share


def some_rows(tree: Any, rows: range) -> Any:
    """Some samples of a batch, with the notes of which they are; a tensor without dims is of all."""

    def cut(leaf: Tensor) -> Tensor:
        if not leaf.dim():
            return leaf
        part, piece = part_of(leaf), leaf[rows.start : rows.stop]
        if part is None:
            return piece
        origin = (part.origin[0] + rows.start, *part.origin[1:])
        return attach(piece, Part(part.shape, origin))

    return map_tensors(cut, tree)


class Schedules:
    """The schedule of the plan, and what it becomes for batches of any size.

    Raises `PlanError` for a plan that no schedule can follow.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.usual = _schedule(mesh)
        """with all its micro-batches"""
        self._found: dict[int, Schedule] = {}

    def of(self, total: int, most: int = 0) -> Schedule:
        """The schedule of a batch of `total` samples, of which the largest replica has `most`, by default as
        many as the rule of ownership gives. One that is too small for all micro-batches has fewer.

        Raises `UsageError` for a batch that cannot be divided.
        """
        most = most or -(-total // self._mesh.layout.data)
        count = min(self.usual.micro_batches, most)
        count -= count % self.usual.chains
        if count < 1:
            raise UsageError(
                f"a batch of {total} samples on {self._mesh.layout.data} replicas is too small for schedule "
                f"{self.usual.name!r}, which needs {self.usual.chains} micro-batches: use larger ones, and "
                "drop_last=True in the loader where it is the last of an epoch"
            )
        if count not in self._found:
            self._found[count] = _schedule(self._mesh, count)
        return self._found[count]


def _schedule(mesh: Mesh, count: int = 0) -> Schedule:
    plan, ranks = mesh.plan.pipeline, mesh.layout.pipe
    whole = 1 if plan.schedule == "layer" else 2 * ranks
    micro_batches = count or plan.micro_batches or whole
    schedule = make(plan.schedule, ranks, micro_batches, plan.stages_per_rank)
    check(schedule)
    return schedule
