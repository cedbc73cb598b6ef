"""How much memory a rank of a pipeline needs for a training step, told without making one.

    plan, rank ─► fake mesh ─► net in stages, loss ─► the rank's row, on tensors without memory ─► bytes

The row is the real one: forward and backward of all micro-batches in the order of the schedule, what they
keep, what is computed again, messages that are expected or have not left, buckets of gradients. See
`fivefold.parallel.program.memory`, which does the same without stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.mesh.fake import fake_mesh
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.batches import Batches, own_samples
from fivefold.parallel.intercept import Share
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.pipeline.batch import Batch, some_rows
from fivefold.parallel.pipeline.cut import MEASURED, Cut
from fivefold.parallel.pipeline.net import PipelinedNet
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.loss import TileLoss
from fivefold.parallel.program.memory import (
    Predicted,
    Rehearse,
    device_of,
    made,
    run_once,
    storage_bytes,
    whole_for_step,
    whole_stand_in,
    with_parts,
)
from fivefold.parallel.program.prepared import Outputs, Prepared
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.weightless import counting, weightless
from fivefold.parallel.trees import call_with, leaves, map_tensors
from fivefold.plan import Plan
from fivefold.torch_private import FakeTensorMode

__all__ = ["predicted_in_stages", "rehearsed_in_stages"]

_T = TypeVar("_T")


def predicted_in_stages(
    net: nn.Module,
    plan: Plan,
    rank: int,
    *,
    inputs: Any,
    targets: Any,
    loss: Callable[..., Any],
    costs: Costs | None = None,
    cut: Cut | None = None,
) -> Predicted:
    """As `fivefold.parallel.program.memory.predicted`, for a layout with a `pipe` axis.

    Stages make their gradients anew in every step, so these are part of what the step makes, not of what
    exists before it; `zero_grad` is taken to have let the old ones go, as it does by default.

    Args:
        net: the plain net, or what a rank of a pipe axis holds of it. It stays as it is.
        plan: layout, pipeline, tiles and memory of it count.
        rank: of all ranks of the layout.
        inputs: the global batch, meta tensors will do; or a part of one that says so, as `shard` gives it.
        targets: likewise.
        loss: as for `fivefold.parallelize`.
        costs: what plans of tiles and cuts go by; typical ones by default, since no other rank is there.
        cut: where the net is cut, if that is known.

    Raises:
        PlanError: there is no such rank, or the plan's pipeline does not go together.
        UsageError: the net cannot be divided so, or the memory of a step depends on numbers; or it would be
            cut by measured times, and `cut` does not say where.
    """
    return rehearsed_in_stages(
        net, plan, rank, run_once, inputs=inputs, targets=targets, loss=loss, costs=costs, cut=cut
    )


def rehearsed_in_stages(
    net: nn.Module,
    plan: Plan,
    rank: int,
    work: Callable[[Rehearse], _T],
    *,
    inputs: Any,
    targets: Any,
    loss: Callable[..., Any],
    costs: Costs | None = None,
    cut: Cut | None = None,
) -> _T:
    """As `fivefold.parallel.program.memory.rehearsed`, for a layout with a `pipe` axis."""
    if cut is None and plan.pipeline.cut == MEASURED:
        raise UsageError(
            f'pipeline.cut = "{MEASURED}" is decided when a run starts: ask its model, model.memory(x, y), '
            "or give `cut`"
        )
    parts, plan = whole_for_step(plan)
    device = device_of(net)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mesh(plan, rank, device) as mesh:
        shapes = map_tensors(_shape, inputs)
        net = _stand_in(fake, net, device)
        stages = PipelinedNet(net, mesh, shapes, costs or Costs(), cut)
        step = _StageStep(stages, mesh, loss, net)
        with weightless(fake):
            batch = (
                map_tensors(lambda leaf: step.tile(leaf, device), shapes),
                map_tensors(lambda leaf: step.samples(leaf, device), map_tensors(_shape, targets)),
            )
            held = [t for t in (*net.parameters(), *net.buffers()) if not t.is_meta]
            return step.rehearsed(work, held, batch, parts)


class _StageStep:
    """A training step of one rank."""

    def __init__(
        self, stages: PipelinedNet, mesh: Mesh, loss: Callable[..., Any], net: nn.Module
    ) -> None:
        self._stages, self._mesh = stages, mesh
        self._loss = SharedLoss(loss, mesh, net)
        self._tile_loss = TileLoss(self._loss, stages.tiles)
        self._everyone = mesh.group("data", *TILE_DIMS)

    def tile(self, leaf: Tensor, device: torch.device) -> Tensor:
        """This rank's part of an input. Ranks without a first stage have none."""
        part = self._stages.tiles.part(leaf, self._mesh.share(leaf.shape[0]))
        return made(part, device if self._stages.begins else torch.device("meta"))

    def samples(self, leaf: Tensor, device: torch.device) -> Tensor:
        """This replica's targets, which ranks with a last stage have."""
        where = device if self._stages.ends else torch.device("meta")
        return made(own_samples(leaf, self._mesh), where)

    def rehearsed(
        self, work: Callable[[Rehearse], _T], held: list[Tensor], batch: tuple[Any, Any], parts: int
    ) -> _T:
        """Let `work` make steps, as second ones would be; `held` are this rank's parameters and buffers."""
        seed = self._mesh.plan.numerics.seed
        share = Batches(self._mesh, self._stages.tiles, asks=False).share(batch[0], seed, 1)
        buckets = self._prepare(batch[0], share)
        given = [leaf for leaf in leaves(batch) if not leaf.is_meta]

        def rehearse(budgeted: Callable[[Program], Budgeted | None]) -> Predicted:
            self._stages.tiles.budgeted = budgeted
            for tensor in held:
                tensor.grad = None
            saved, peak = self._counted([*held, *buckets, *given], batch, share)
            told = Predicted(
                self._mesh.rank,
                self._mesh.layout,
                parameters_bytes=sum(map(storage_bytes, held)),
                gradients_bytes=0,
                buckets_bytes=sum(map(storage_bytes, buckets)),
                batch_bytes=sum(map(storage_bytes, given)),
                saved_bytes=saved,
                peak_bytes=peak,
                trained_bytes=sum(map(storage_bytes, (t for t in held if t.requires_grad))),
            )
            return with_parts(told, parts)

        return work(rehearse)

    def _counted(
        self, every: list[Tensor], batch: tuple[Any, Any], share: Share
    ) -> tuple[int, int]:
        """Bytes that are saved for backward, and the most, of a step."""
        saved = 0
        with counting(every, self._mesh.device, max(share.rows, 1)) as count:
            before = count.now()

            def at_backward(loss: Tensor) -> Tensor:
                nonlocal saved
                saved = max(saved, count.now() - before)
                return loss

            self._run(*batch, share, at_backward)
        return saved, count.most() - before

    def _prepare(self, inputs: Any, share: Share) -> list[Tensor]:
        """Make what stays from step to step: plans, and buckets, which are returned."""
        self._stages.prepare(Batch(call_with, inputs, share))
        return [b.flat for g in self._stages.all_gradients() for b in g.buckets]

    def _run(
        self, inputs: Any, targets: Any, share: Share, scaled: Callable[[Tensor], Tensor]
    ) -> None:
        """What `ParallelModel.step` does."""
        weight = None
        if self._stages.ends:
            cut = self._tile_loss.in_tiles(targets)
            weight = self._loss.begin(targets, self._everyone if cut else None)

        def own(rows: range, ready: Prepared, outputs: Outputs) -> tuple[Tensor, Tensor | None]:
            part = some_rows(targets, rows)
            return self._tile_loss.of_micro_batch(outputs, part, weight, ready.share)

        divided = self._loss.split is None and self._loss.shares
        self._stages.step(Batch(call_with, inputs, share), own, scaled, divided=divided)


def _shape(leaf: Tensor) -> Tensor:
    """A leaf of the whole batch that `leaf` is, or is a part of."""
    part = part_of(leaf)
    shape = leaf.shape if part is None else part.shape
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def _stand_in(fake: FakeTensorMode, net: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a net whose tensors have no memory."""
    made: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        bare = (
            torch.empty_like(tensor, device=device)
            if tensor.is_meta
            else whole_stand_in(fake, tensor)
        )
        whole = bare.detach()
        trained = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if trained else whole
    return copy.deepcopy(net, made)
