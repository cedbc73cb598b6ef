"""How much memory a rank needs for a training step, or for outputs alone, told without computing.

    plan, rank ─► fake mesh ─► net in tiles, loss, reducer ─► step on tensors without memory ─► bytes

The step is the real one: plan, exchanges, norms, what is kept for backward and what is computed again, loss,
buckets of gradients. Its tensors have no memory and its groups bring nothing, so one process can look at any
rank of any layout. The bytes of every storage count from the operation that makes it to its end. What an
operation takes within itself (a workspace, say) and what an allocator wastes is not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fivefold.errors import PlanError
from fivefold.mesh import Mesh, attach, part_of
from fivefold.mesh.fake import fake_mesh
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.batches import Batches, own_samples
from fivefold.parallel.intercept import Share
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.memory.table import StepChoices
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.loss import TileLoss
from fivefold.parallel.program.net import RecordedNet, no_budget
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.weightless import counting, weightless
from fivefold.parallel.reduce import Alone, Bucketed, Reducer, reducer_for
from fivefold.parallel.trees import call_with, leaves, map_tensors
from fivefold.plan import Layout, Plan
from fivefold.torch_private import FakeTensorMode, fake_of, is_dtensor

__all__ = [
    "Predicted", "Rehearse", "device_of", "made", "predicted", "rehearsed", "run_once", "storage_bytes",
    "whole_for_step", "whole_stand_in", "with_parts",
]  # fmt: skip

_T = TypeVar("_T")


@dataclass(frozen=True)
class Predicted:
    """Bytes of one rank. Printed, it is a table."""

    rank: int
    layout: Layout
    parameters_bytes: int
    """parameters and buffers of the net"""
    gradients_bytes: int
    """that are there before the step, of all parameters that are trained; 0 with stages"""
    buckets_bytes: int
    """copies of gradients, in which they travel"""
    batch_bytes: int
    """this rank's inputs and targets"""
    saved_bytes: int
    """made by the step and alive when backward begins: what autograd saved, the net's outputs, the loss"""
    peak_bytes: int
    """made by the step, the most that is alive at any time of forward and backward"""

    trained_bytes: int = 0
    """of parameters that are trained"""
    choices: StepChoices | None = None
    """what is kept, computed again and spilled under a budget"""

    @property
    def total_bytes(self) -> int:
        """The most that is alive in a step, with what exists before it."""
        standing = self.parameters_bytes + self.gradients_bytes + self.buckets_bytes
        return standing + self.batch_bytes + self.peak_bytes

    def __str__(self) -> str:
        rows = [
            ("parameters and buffers", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("gradients on their way", self.buckets_bytes),
            ("inputs and targets", self.batch_bytes),
            ("most alive of a step", self.peak_bytes),
            ("all of it", self.total_bytes),
            ("saved for backward", self.saved_bytes),
        ]
        rows = rows if self.saved_bytes else [row for row in rows if row[1]]
        lines = [f"{name:<24}{size / 2**20:>12,.1f} MiB" for name, size in rows]
        if self.saved_bytes:
            lines[-1] += ", of the most alive"
        return "\n".join(
            [
                f"rank {self.rank} of {self.layout.size} ({self.layout}), predicted:",
                *lines,
                "Not counted: the optimiser's state, workspaces of kernels, torch itself.",
                *(["", str(self.choices)] if self.choices else []),
            ]
        )


def predicted(
    net: nn.Module,
    plan: Plan,
    rank: int,
    *,
    inputs: Any,
    targets: Any = None,
    loss: Callable[..., Any] | None = None,
    costs: Costs | None = None,
) -> Predicted:
    """What `model.step(inputs, targets)` needs on `rank` of `plan.layout`. Nothing is computed.

    Without a loss it is what `model(inputs)` needs under `torch.no_grad()`; the most alive includes outputs.

    Gradients are taken to be there before the step, as with `zero_grad(set_to_none=False)`: those that come
    are added to them in the end. By default there are none, and a step needs less by `gradients_bytes`.

    Args:
        net: the plain net, on the device whose memory is asked for. It stays as it is.
        plan: layout, tiles and memory of it count.
        rank: of all ranks of the layout.
        inputs: the global batch, meta tensors will do; or this rank's part of one, as `shard` gives it.
        targets: likewise. Those of the global batch are cut into samples, as `shard` does, not into tiles.
        loss: as for `fivefold.parallelize`; None for outputs alone.
        costs: what `tiles.fuse = "auto"` goes by; typical ones by default, since no other rank is there.

    Raises:
        PlanError: there is no such rank, or the layout has no tile axes, or a `pipe` axis.
        UsageError: the net cannot be computed in tiles, or the memory of a step depends on numbers.
    """
    if plan.layout.tiles == 1 or plan.layout.pipe > 1:
        raise PlanError(
            f"memory is predicted for layouts with tile axes and without pipe, not for {plan.layout}: set "
            "height, width or depth, and leave pipe at 1; for stages, see fivefold.parallel.pipeline.memory"
        )
    return rehearsed(
        net, plan, rank, run_once, inputs=inputs, targets=targets, loss=loss, costs=costs
    )


Rehearse = Callable[[Callable[[Program], Budgeted | None]], Predicted]
"""what programs do under a budget, see `RecordedNet.budgeted` -> what such a step needs"""


def run_once(rehearse: Rehearse) -> Predicted:
    """A step without a budget."""
    return rehearse(no_budget)


def rehearsed(
    net: nn.Module,
    plan: Plan,
    rank: int,
    work: Callable[[Rehearse], _T],
    *,
    inputs: Any,
    targets: Any,
    loss: Callable[..., Any] | None,
    costs: Costs | None = None,
) -> _T:
    """What `work` returns, which may make steps without memory as often as it likes; see `predicted`.

    Layouts without tile axes are right as well.
    """
    parts, plan = whole_for_step(plan)
    device = device_of(net)
    with fake_mesh(plan, rank, device) as mesh:
        step = _Step(net, mesh, loss, costs or Costs(), parts)
        batch = step.batch(inputs, targets)
        with weightless() as fake:
            on_device = map_tensors(lambda part: made(part, device), batch)
            stand_ins = _stand_ins(fake, net, with_gradients=parts == 1 and loss is not None)
            return functional_call(step, stand_ins, (work, *on_device))


def whole_for_step(plan: Plan) -> tuple[int, Plan]:
    """Among how many replicas a plan divides parameters between steps, and a plan that does not.

    Within a step they are whole; what the parts take beside is told by `with_parts`.
    """
    memory = plan.memory
    parts = plan.layout.data if memory.shard != "none" else 1
    return parts, dataclasses.replace(plan, memory=dataclasses.replace(memory, shard="none"))


def with_parts(told: Predicted, parts: int) -> Predicted:
    """What a step needs of which so many replicas each hold a part of all that is trained, between steps.

    Gradients are whole when backward ends, and are then added to parts.
    """
    if parts == 1:
        return told
    own = -(-told.trained_bytes // parts)
    return dataclasses.replace(
        told,
        parameters_bytes=told.parameters_bytes + own,
        gradients_bytes=own,
        trained_bytes=own,
    )


def _stand_ins(fake: FakeTensorMode, net: nn.Module, *, with_gradients: bool) -> dict[str, Tensor]:
    """Parameters and buffers, by the names that `_Step` has for them."""
    found: dict[str, Tensor] = {}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        found[f"net.{name}"] = made = whole_stand_in(fake, tensor)
        if made.requires_grad and with_gradients:
            made.grad = torch.zeros_like(made)
    return found


def whole_stand_in(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor without memory for another; a whole one for a tensor of which this rank has a part."""
    if not is_dtensor(tensor):
        return fake_of(fake, tensor)
    with fake:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(made, tensor.requires_grad)


class _Step(nn.Module):
    """A training step of one rank, or a forward if there is no loss, which counts what it makes."""

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        loss: Callable[..., Any] | None,
        costs: Costs,
        parts: int,
    ) -> None:
        super().__init__()
        axes = ("data", *TILE_DIMS)
        self.net = net
        self._mesh, self._parts = mesh, parts
        self._tiles = RecordedNet(net, mesh, costs)
        self._loss = None if loss is None else SharedLoss(loss, mesh, net)
        self._tile_loss = None if self._loss is None else TileLoss(self._loss, self._tiles)
        self._everyone, self._gradients = mesh.group(*axes), mesh.own_group(*axes)
        self._joint = mesh.plan.parallel.batch_norm == "global"

    def batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """This rank's part of a batch, as meta tensors that say which part they are."""

        def tile(leaf: Tensor) -> Tensor:
            return self._tiles.part(leaf, self._mesh.share(leaf.shape[0]))

        def samples(leaf: Tensor) -> Tensor:
            return own_samples(leaf, self._mesh)

        def cut(leaf: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
            part = part_of(leaf)
            bare = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            return how(bare) if part is None else attach(bare, part)

        return (
            map_tensors(lambda leaf: cut(leaf, tile), inputs),
            map_tensors(lambda leaf: cut(leaf, samples), targets),
        )

    def forward(self, work: Callable[[Rehearse], _T], inputs: Any, targets: Any) -> _T:
        """Let `work` make steps on this rank's part of a batch, as second ones would be made."""
        reducer = Alone()
        if self._parts == 1 and self._loss is not None:
            reducer = reducer_for(self.net, self._gradients, share_buffers=not self._joint)
        reducer.begin()
        share = Batches(self._mesh, self._tiles).share(inputs, self._mesh.plan.numerics.seed, 1)
        with torch.set_grad_enabled(self._loss is not None):  # it is recorded for either
            self._tiles.prepare(call_with, [inputs], share)
        existing = self._existing(reducer, leaves((inputs, targets)))
        every = [tensor for found in existing.values() for tensor in found]

        def rehearse(budgeted: Callable[[Program], Budgeted | None]) -> Predicted:
            self._tiles.budgeted = budgeted
            saved, peak = self._counted(every, inputs, targets, share, reducer)
            sizes = (sum(map(storage_bytes, found)) for found in existing.values())
            for parameter in self.net.parameters() if self._parts > 1 else ():
                parameter.grad = None
            told = Predicted(
                self._mesh.rank,
                self._mesh.layout,
                *sizes,
                saved_bytes=saved,
                peak_bytes=peak,
                trained_bytes=sum(
                    storage_bytes(p) for p in self.net.parameters() if p.requires_grad
                ),
            )
            return told if self._loss is None else with_parts(told, self._parts)

        return work(rehearse)

    def _counted(
        self, every: Sequence[Tensor], inputs: Any, targets: Any, share: Share, reducer: Reducer
    ) -> tuple[int, int]:
        """Bytes that are saved for backward, and the most, of a step."""
        saved = 0
        with counting(every, self._mesh.device, max(share.rows, 1)) as count:
            before = count.now()

            def at_backward(loss: Tensor) -> Tensor:
                nonlocal saved
                saved = count.now() - before
                return loss

            self._run(inputs, targets, share, reducer, at_backward)
        return saved, count.most() - before

    def _existing(self, reducer: Reducer, batch: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """What is there before a step, by the names that `Predicted` has for it."""
        return {
            "parameters_bytes": [*self.net.parameters(), *self.net.buffers()],
            "gradients_bytes": [p.grad for p in self.net.parameters() if p.grad is not None],
            "buckets_bytes": [b.flat for b in reducer.buckets]
            if isinstance(reducer, Bucketed)
            else [],
            "batch_bytes": batch,
        }

    def _run(
        self,
        inputs: Any,
        targets: Any,
        share: Share,
        reducer: Reducer,
        scaled: Callable[[Tensor], Tensor],
    ) -> None:
        """What `ParallelModel.step` does, or calling it."""
        if self._loss is None or self._tile_loss is None:
            with torch.no_grad():
                self._tiles.run(call_with, inputs, share)
            return
        cut = self._tile_loss.in_tiles(targets)
        weight = self._loss.begin(targets, self._everyone if cut else None)
        reducer.begin()
        outputs = self._tiles.run(call_with, inputs, share)
        own = self._tile_loss.share(outputs, targets, weight, share)
        with torch.autocast(self._mesh.device.type, enabled=False):
            reducer.backward(own, scaled)


def device_of(net: nn.Module) -> torch.device:
    """Where a net computes; what another rank holds is on the meta device."""
    found = (p.device for p in net.parameters() if not p.is_meta)
    return next(found, torch.device("cpu"))


def made(part: Tensor, device: torch.device) -> Tensor:
    """A part of a batch on a device, with its note of which one it is."""
    note = part_of(part)
    assert note is not None
    return attach(torch.empty(part.shape, dtype=part.dtype, device=device), note)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of what a tensor is a view of."""
    return tensor.untyped_storage().nbytes()
