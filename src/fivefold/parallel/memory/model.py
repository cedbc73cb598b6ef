"""How much memory the steps of a model need; and what they do to need no more than `memory.budget`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh, Part, attach, part_of
from fivefold.parallel.graph.record import LeftBehind
from fivefold.parallel.intercept import Share, quietly
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.memory.plain import PlainBudget
from fivefold.parallel.memory.step import StepBudget
from fivefold.parallel.pipeline.memory import rehearsed_in_stages
from fivefold.parallel.pipeline.net import PipelinedNet
from fivefold.parallel.program.loss import TileLoss
from fivefold.parallel.program.memory import Predicted, Rehearse, rehearsed, run_once
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.trees import call_with, map_tensors

__all__ = ["StepMemory"]

_T = TypeVar("_T")
_LAYERS = 'memory.shard = "parameters" gathers parameters as modules are called'


class StepMemory:
    """Of one model.

    With a budget, or compiled, nets are recorded on the data axis and in one process as well: `recorded`
    computes them then, as one tile. A net that cannot be recorded runs by itself, see `PlainBudget`.
    """

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        loss: SharedLoss | None,
        tiles: RecordedNet | None,
        stages: PipelinedNet | None,
        *,
        compiles: bool = False,
    ) -> None:
        self._net, self._mesh, self._loss = net, mesh, loss
        self._tiles, self._stages = tiles, stages
        self.recorded: tuple[RecordedNet, TileLoss] | None = None
        """computes steps in place of the net"""
        self._budget: StepBudget | PlainBudget | None = None
        self._steps = 0
        memory, self._compiles = mesh.plan.memory, compiles
        if not (memory.budget or compiles) or loss is None:
            return
        if memory.shard == "parameters" and mesh.layout.data > 1:
            self._by_itself(_LAYERS)
            return
        if tiles is None:
            self._tiles = RecordedNet(net, mesh)
            self.recorded = self._tiles, TileLoss(loss, self._tiles)
        assert self._tiles is not None
        self._tiles.compiles = compiles
        if memory.budget:
            self._budget = StepBudget(mesh, net, self._rehearsed, self._tiles.costs)
            self._tiles.budgeted = self._budget.budgeted

    def _by_itself(self, why: str) -> None:
        """The net runs as it is, since it cannot be recorded."""
        self.recorded = None
        if self._mesh.plan.memory.budget:
            self._budget = PlainBudget(self._mesh, self._net, why)
        else:
            warn(f"parallel.compile leaves the net as it is, since {why}")

    def step(self, inputs: Any, targets: Any, share: Share) -> AbstractContextManager[None]:
        """Within the block a step is made on a batch. Collective.

        Raises `UsageError` on all ranks where it holds too much on one.
        """
        self._steps += 1
        if self._steps == 1 and self.recorded is not None:
            self._look(inputs, share)
        if self._budget is None:
            return nullcontext()
        return self._budget.step(inputs, targets, functools.partial(_noted, share=share))

    def children(self) -> AbstractContextManager[None]:
        """Within the block a net runs by itself, and backward."""
        return self._budget.children() if isinstance(self._budget, PlainBudget) else nullcontext()

    def _look(self, inputs: Any, share: Share) -> None:
        """Do without the recorded net where it cannot be recorded on some rank."""
        assert self.recorded is not None
        why = ""
        try:
            with quietly():
                self.recorded[0].program_for(call_with, inputs, share)
        except LeftBehind:
            raise
        except UsageError as problem:
            why = str(problem)
        if not self._mesh.agreement.same(bool(why)) or why:
            self._by_itself(why or "the net cannot be recorded on another rank")

    def told(self, inputs: Any, targets: Any) -> Predicted:
        """What a step on such a batch needs. Raises `UsageError` where nobody can tell."""
        if self._budget is not None:
            return self._budget.told(inputs, targets)
        if self._mesh.plan.tiles.by_turns:
            raise UsageError(
                "memory is not predicted for images that are computed by turns: set memory.budget, which "
                "they keep to, or leave tiles.turns empty"
            )
        if self._compiles:
            raise UsageError(
                "memory is not predicted for compiled steps, whose compiler decides what they keep: set "
                "parallel.compile = false to see what they take without it"
            )
        if self._tiles is None or self._loss is None:
            raise UsageError(
                "memory is predicted for steps in tiles and stages, and under a budget: set height, width, "
                "depth or pipe in the layout, or memory.budget, and give parallelize a loss"
            )
        return self._rehearsed(inputs, targets, run_once)

    def _rehearsed(self, inputs: Any, targets: Any, work: Callable[[Rehearse], _T]) -> _T:
        assert self._loss is not None and self._tiles is not None
        rehearse = (
            rehearsed
            if self._stages is None
            else functools.partial(rehearsed_in_stages, cut=self._stages.cut)
        )
        return rehearse(
            self._net,
            self._mesh.plan,
            self._mesh.rank,
            work,
            inputs=inputs,
            targets=targets,
            loss=self._loss.loss,
            costs=self._tiles.costs,
        )


def _noted(tree: Any, share: Share) -> Any:
    """Tensors without numbers that say which samples of the whole batch they are."""

    def noted(leaf: Tensor) -> Tensor:
        part = part_of(leaf)
        if part is None and leaf.dim():
            part = Part((share.total, *leaf.shape[1:]), (share.origin, *(0,) * (leaf.dim() - 1)))
        bare = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return bare if part is None else attach(bare, part)

    return map_tensors(noted, tree)
