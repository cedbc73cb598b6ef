"""A started layout: where this process stands on every axis, and whom it talks to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold import comm
from fivefold.errors import PlanError, suggest
from fivefold.launch.progress import own_progress
from fivefold.launch.role import Role
from fivefold.mesh.agreement import Agreement
from fivefold.mesh.groups import lines, subgroup
from fivefold.mesh.ownership import TILE_DIMS, owned
from fivefold.plan import AXES, Layout, Plan
from fivefold.trace import Tag

__all__ = ["Mesh"]


@dataclass
class Mesh:
    """What `fivefold.start` returns. Read it freely; nothing in it needs to be changed by hand."""

    plan: Plan
    layout: Layout
    rank: int
    """position of this process among all trainers, 0 to size - 1"""
    size: int
    """number of trainers"""
    device: torch.device
    """where this rank computes: models are moved there, loaders yield there"""
    device_mesh: DeviceMesh
    """torch's view of the same mesh, its dims named like the axes, for DTensor, FSDP2 and the like"""
    owns_world: bool = True
    """whether `stop` ends torch.distributed (not when it was running before `start`)"""
    role: Role = "trainer"
    """what this process is for; a helper has a mesh of its own, of one process"""
    predicts: bool = False
    """whether its groups bring nothing: a mesh to find out what a rank would do"""
    _joint: dict[tuple[str, ...], dist.ProcessGroup] = field(
        default_factory=dict[tuple[str, ...], dist.ProcessGroup], repr=False
    )

    def __repr__(self) -> str:
        who = f"rank {self.rank} of {self.size}" if self.role == "trainer" else self.role
        return f"Mesh({who}, {self.layout}, {self.device})"

    def coordinate(self, axis: str) -> int:
        """Position of this rank along `axis`."""
        # Not `get_local_rank`, which asks for a group: loaders want this for every batch of an epoch.
        here = self.device_mesh.get_coordinate()
        assert here is not None, "every rank is in the mesh"
        return here[AXES.index(_known(axis))]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axes` only; all ranks ask in the same order.

        Raises `PlanError` for an unknown axis.
        """
        wanted = tuple(axis for axis in AXES if axis in {_known(a) for a in axes})
        assert wanted, "name at least one axis"
        larger = tuple(axis for axis in wanted if getattr(self.layout, axis) > 1) or wanted[:1]
        if len(larger) == 1:
            return self.device_mesh.get_group(larger[0])
        if larger not in self._joint:
            enumerated, use = self._lines(larger).tolist(), f"mesh_{'_'.join(larger)}"
            self._joint[larger] = subgroup(enumerated, self.plan.comm.timeout_s, self.device, use)
        return self._joint[larger]

    @cached_property
    def agreement(self) -> Agreement:
        """Compares what ranks do. All ranks ask for it first at the same time."""
        return Agreement(self)

    def own_group(self, *axes: str) -> dist.ProcessGroup:
        """A new group of the ranks of `group(*axes)`, for messages whose order among others is not fixed.

        Without axes, a group of this rank alone. Collective: all ranks of the mesh call it, in the same
        order. Raises `PlanError` for an unknown axis.
        """
        return self._new_group(self._lines(axes).tolist())

    def pair_group(self, *axes: str) -> dist.ProcessGroup:
        """As `own_group`, but with the ranks at the mirrored position on the `pipe` axis as well.

        The stages of two opposite chains meet there: position r of S with position S - 1 - r.
        """
        last = self.layout.pipe - 1
        return self._joined([{r, last - r} for r in range(last // 2 + 1)], axes)

    def joint_group(self, positions: AbstractSet[int], *axes: str) -> dist.ProcessGroup:
        """As `own_group`, but with the ranks at some positions on the `pipe` axis in one group."""
        others = [{r} for r in range(self.layout.pipe) if r not in positions]
        return self._joined([positions, *others], axes)

    def _joined(
        self, positions: Sequence[AbstractSet[int]], axes: tuple[str, ...]
    ) -> dist.ProcessGroup:
        lines = self._lines(axes)
        stages = lines.view(self.layout.pipe, -1, lines.shape[-1])
        return self._new_group(
            [
                sorted({rank for r in some for rank in stages[r, line].tolist()})
                for some in positions
                for line in range(stages.shape[1])
            ]
        )

    def neighbours(self, holds: int) -> dist.ProcessGroup:
        """A new group of the instances on this rank's device that say the same number as this one.

        Collective: all ranks of the mesh call it, in the same order.
        """
        told = comm.all_gather(
            torch.tensor(holds, device=self.device), self.group(*AXES), Tag.CONTROL
        ).tolist()
        found: dict[tuple[int, int], list[int]] = {}
        for rank, number in enumerate(told):
            device = rank // self.plan.instances.per_device
            found.setdefault((device, number), []).append(rank)
        return self._new_group([*found.values()])

    def own_replicas(self) -> DeviceMesh:
        """The ranks that hold the same parameters as this one, over groups of their own, for FSDP2.

        Its last dim is the data axis; with tile axes there is one before, `tiles`. Collective: all ranks of
        the mesh call it, in the same order.
        """
        data, kind = self.own_group("data"), self.device.type
        if self.layout.tiles == 1:
            return DeviceMesh.from_group(data, kind, mesh_dim_names=("data",))
        lines = self._lines(("data", *TILE_DIMS))
        mine = lines[(lines == self.rank).any(dim=1)]
        ranks = mine.view(self.layout.data, self.layout.tiles).t().contiguous()
        tiles = self.own_group(*TILE_DIMS)
        return DeviceMesh.from_group([tiles, data], kind, ranks, mesh_dim_names=("tiles", "data"))

    def _lines(self, axes: tuple[str, ...]) -> torch.Tensor:
        return lines(self.device_mesh.mesh, [*map(_known, axes)])

    def _new_group(self, enumerated: list[list[int]]) -> dist.ProcessGroup:
        made = subgroup(enumerated, self.plan.comm.timeout_s, self.device, fresh=True)
        if self.plan.instances.per_device > 1:
            comm.add_in_order(made)  # as one process accumulates the parts of a batch
        return made

    def share(self, n: int) -> range:
        """Which of the `n` samples of a global batch this rank's replica owns."""
        return owned(n, self.layout.data, self.coordinate("data"))

    def stop(self) -> None:
        """Leave the mesh; ends torch.distributed if `start` began it. Calling it again does nothing."""
        own_progress().leave()
        if self.owns_world and dist.is_initialized():
            # A gloo group ends by waiting for its threads while it holds the interpreter, which they may
            # need to give back their last tensor: a moment for them, else both wait for ever.
            time.sleep(0.01)
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()


def _known(axis: str) -> str:
    if axis not in AXES:
        raise PlanError(f"unknown mesh axis {axis!r}{suggest(axis, AXES)}")
    return axis
