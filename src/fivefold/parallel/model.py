"""`parallelize` and the object it returns.

step(x, y):   weights of all targets  ─────────────┐ (summed over ranks while forward runs)
              outputs = net(x)   batch norm, dropout: intercept
              share   = own numerator / weight of all ranks' targets        losses
              loss    = sum of shares, and gradients: while backward runs   reduce
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, attach, part_of
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.exchange import row_counts
from fivefold.parallel.intercept import Share, exact, watched_modules
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.pipeline.memory import predicted_in_stages
from fivefold.parallel.pipeline.net import Batch, PipelinedNet, pipelined, some_rows
from fivefold.parallel.reduce import Alone, reducer_for
from fivefold.parallel.refuse import check_loss, check_net
from fivefold.parallel.tiles.loss import TileLoss, whole_images
from fivefold.parallel.tiles.memory import Predicted, predicted
from fivefold.parallel.tiles.net import Outputs, Prepared, TiledNet
from fivefold.parallel.tiles.table import table
from fivefold.parallel.trees import call_with, leaves, map_tensors, rows_of, stand_in
from fivefold.trace import Phase, span

__all__ = ["ParallelModel", "parallelize"]


def parallelize(
    net: nn.Module,
    mesh: Mesh,
    *,
    example: object = None,
    loss: Callable[..., Any] | None = None,
) -> ParallelModel:
    """Make a plain net compute over the whole mesh what it would compute in one process.

    The net is moved to `mesh.device`; its parameters and buffers are made equal to the first replica's. It
    stays as it is, under `.module`, and so do the keys of its state_dict.

    Args:
        net: any `nn.Module` in eager mode.
        mesh: what `fivefold.start` returned.
        example: inputs with the shapes of the global batch, meta tensors will do. With tile axes the plan
            for this shape is made at once, so that what cannot be computed in tiles is told before training.
            A layout with a `pipe` axis needs it: the net is cut for these shapes.
        loss: `loss(outputs, targets) -> scalar`, a loss of torch's, or any callable; see `losses`.

    Raises:
        PlanError: the plan's schedule, micro-batches or stages do not go together, or not with the net.
        UsageError: the net is compiled, scripted, already wrapped, or not yet initialised; or there is no
            example for a layout with a `pipe` axis.
    """
    check_net(net, mesh.layout.data)
    check_loss(loss)
    model = ParallelModel(net.to(mesh.device), mesh, loss, example)
    if example is not None and mesh.layout.tiles > 1:
        model.tile_plan(example)
    return model


class ParallelModel(nn.Module):
    """A net on a mesh. Call it for outputs, `step` for a training step; `.module` is the user's net."""

    module: nn.Module

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        loss: Callable[..., Any] | None,
        example: object = None,
    ) -> None:
        super().__init__()
        self.module = net
        self.steps = 0
        """number of `step` calls so far: random masks are a function of it"""
        self.seed = mesh.plan.numerics.seed
        self._mesh = mesh
        self._group = mesh.group("data")
        self._loss = None if loss is None else SharedLoss(loss, self._group, mesh.device)
        self._watched = watched_modules(net)
        self._joint = mesh.plan.parallel.batch_norm == "global"
        # In a tuple, so that neither the reducer nor what it wraps is a submodule of ours.
        # Apart from batch norm: buckets leave when they are full, which ranks that use different parameters
        # see at different times, and a group matches messages by their order.
        tiled = mesh.layout.tiles > 1
        axes = ("data", *TILE_DIMS)
        gradients = mesh.own_group(*axes) if mesh.layout.data > 1 or tiled else self._group
        self._stages = pipelined(net, mesh, example, loss) if mesh.layout.pipe > 1 else None
        if self._stages is not None:
            self._tiles = self._stages.tiles
        else:
            self._tiles = TiledNet(net, mesh) if tiled else None
        self._tile_loss = (
            TileLoss(self._loss, self._tiles) if self._tiles and self._loss is not None else None
        )
        self._everyone = mesh.group(*axes)
        self.on_outputs: Callable[[Any], None] | None = None
        """called in every step with what the net returned for this rank's part: for metrics of training"""
        alone = self._stages is not None  # stages see to their gradients themselves
        self._reducer = (
            Alone() if alone else reducer_for(net, gradients, share_buffers=not self._joint),
        )

    # ---- one training step

    def step(self, inputs: Any, targets: Any = None, scaler: Any = None) -> Tensor:
        """Forward and backward over the whole mesh; gradients are complete on return.

        Args:
            inputs: this rank's samples, as the loader or `shard` gave them: a pytree of tensors (rows, ...).
                A tuple is positional arguments, a dict keyword arguments of the net. Tensors that carry no
                note of their part are this rank's share, in rank order, and the counts are exchanged.
                Ranks of a `pipe` axis that hold no first stage may pass None for a batch like the example.
            targets: what the loss compares with; samples on the leading dim. None will do where there is no
                last stage.
            scaler: a `torch.amp.GradScaler`, which then scales what backward starts from.

        Returns the loss of the whole batch, detached; it travels with the gradients.
        Repeated calls accumulate gradients. Autocast is honoured in forward.

        Raises:
            UsageError: no loss was given, the batch is empty on all ranks, or its tensors do not share
                their leading dim.
        """
        if self._loss is None:
            raise UsageError("step needs a loss: parallelize(net, mesh, loss=criterion)")
        inputs, targets = self._moved(inputs), self._moved(targets)
        if self._stages is not None and inputs is None:
            inputs = self._stages.stand_in()
        share = self._share(inputs)
        self.steps += 1
        if self._stages is not None:
            return self._step_in_stages(self._stages, inputs, targets, share, scaler)
        if self._tiles is not None:
            return self._step_in_tiles(self._tiles, inputs, targets, share, scaler)
        weight = self._loss.begin(targets)
        with exact(self._watched, share) as mode:
            with span(Phase.FORWARD):
                self._reducer[0].begin()
                with mode:
                    outputs = _run_or_stand_in(self.module, inputs, share.rows, call_with)
                if self.on_outputs is not None:
                    self.on_outputs(outputs)
                own = self._loss.share(outputs, targets, weight, share.rows, share.total)
            # Still within `exact`: what is checkpointed runs again during backward.
            with span(Phase.BACKWARD), torch.autocast(self._mesh.device.type, enabled=False):
                return self._backward(own, share, _as_it_is if scaler is None else scaler.scale)

    def _step_in_tiles(
        self, tiles: TiledNet, inputs: Any, targets: Any, share: Share, scaler: Any
    ) -> Tensor:
        assert self._loss is not None
        assert self._tile_loss is not None
        cut = self._tile_loss.in_tiles(targets)
        weight = self._loss.begin(targets, self._everyone if cut else None)
        with span(Phase.FORWARD):
            self._reducer[0].begin()
            outputs = tiles.run(call_with, inputs, share)
            if self.on_outputs is not None:
                self.on_outputs(outputs.parts)
            own = self._tile_loss.share(outputs, targets, weight, share)
        with span(Phase.BACKWARD), torch.autocast(self._mesh.device.type, enabled=False):
            return self._backward(own, share, _as_it_is if scaler is None else scaler.scale)

    def _step_in_stages(
        self, stages: PipelinedNet, inputs: Any, targets: Any, share: Share, scaler: Any
    ) -> Tensor:
        assert self._loss is not None
        loss, tile_loss = self._loss, self._tile_loss
        assert tile_loss is not None
        weight = None
        if stages.ends:
            if targets is None:
                raise UsageError("this rank holds a last stage, so step needs the targets")
            weight = loss.begin(targets, self._everyone if tile_loss.in_tiles(targets) else None)

        def own(rows: range, ready: Prepared, outputs: Outputs) -> Tensor:
            if self.on_outputs is not None:
                self.on_outputs(outputs.parts)
            return tile_loss.share(outputs, some_rows(targets, rows), weight, ready.share)

        scaled = _as_it_is if scaler is None else scaler.scale
        total = stages.step(Batch(call_with, inputs, share), own, scaled)
        if scaler is not None:
            scaler.scale(total)  # it begins with its first use, which may be on other ranks only
            stages.agree_on_overflow()
        return total.to(next(p.dtype for p in self.module.parameters()))

    def tile_plan(self, example: Any) -> str:
        """The plan of this rank for inputs with the global shapes of `example`, as a table.

        It lists every exchange with its messages and bytes, every operation with what is owned, what is held
        beyond, and what that costs.

        Raises `UsageError` for what cannot be computed in tiles, and for a layout without tile axes.
        """
        if self._tiles is None:
            raise UsageError(
                "the layout has no tile axes, so there is no plan of tiles: set height, width or depth"
            )
        return table(self._tiles.plan_for(example, self._mesh.share), self._tiles.here)

    def memory(self, inputs: Any, targets: Any = None) -> Predicted:
        """How much memory a step on such a batch takes on this rank, told without making it.

        Both are the global batch's, meta tensors will do, or this rank's part, as `step` takes it. Printed,
        the result is a table. Raises `UsageError` without a loss or on the data axis alone, and where memory
        depends on the numbers in the batch.
        """
        if self._tiles is None or self._loss is None:
            raise UsageError(
                "memory is predicted for steps in tiles and stages: set height, width, depth or pipe in the "
                "layout, and give parallelize a loss"
            )
        told = (
            predicted
            if self._stages is None
            else functools.partial(predicted_in_stages, cut=self._stages.cut)
        )
        return told(
            self.module,
            self._mesh.plan,
            self._mesh.rank,
            inputs=inputs,
            targets=targets,
            loss=self._loss.loss,
            costs=self._tiles.costs,
        )

    def _backward(self, own: Tensor, share: Share, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        hooks = []
        if not share.rows:  # a stand-in adds nothing, even where it gave NaN
            trained = [p for p in self.module.parameters() if p.requires_grad]
            hooks = [parameter.register_hook(_nothing) for parameter in trained]
        try:
            return self._reducer[0].backward(own, scaled)
        finally:
            for hook in hooks:
                hook.remove()

    def shard(self, *trees: Any) -> Any:
        """This rank's part of a batch that every rank holds whole; a tuple if several trees are given.

        The first tree, the inputs, is cut into tiles as well. Targets keep their pixels: they are laid as the
        outputs lie, which only the step knows.
        """
        mine = tuple(
            map_tensors(self._tile if self._tiles and not number else self._cut, tree)
            for number, tree in enumerate(trees)
        )
        return mine[0] if len(mine) == 1 else mine

    def whole(self, tree: Any) -> Any:
        """A batch of tiles, as a loader of windows yields them, with whole images of this replica's samples.

        Collective over the tiles of a replica. Other tensors, and all where there are no tiles, stay as
        they are.
        """
        return tree if self._tiles is None else whole_images(self._tiles, tree)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs for this rank's samples. In training mode, batch statistics are the mesh's.

        With a `pipe` axis all of its ranks get the outputs, without gradients.
        """
        inputs = self._moved((args, kwargs))
        if not leaves(inputs):
            return self.module(*args, **kwargs)
        if self._stages is not None:
            if self.training:
                raise UsageError(
                    "with a pipe axis a model in training mode has outputs in step only, where `on_outputs` "
                    "sees them: call model.eval() first"
                )
            return self._stages.forward(Batch(_call_both, inputs, self._share(inputs)))
        if self._tiles is not None:
            return self._tiles.run(_call_both, inputs, self._share(inputs)).parts
        if self.training:
            share = dataclasses.replace(self._share(inputs), draws=False)
            self._reducer[0].begin()
            with exact(self._watched, share) as mode, mode:
                return _run_or_stand_in(self.module, inputs, share.rows, _call_both)
        rows = rows_of(inputs, "inputs")
        return _run_or_stand_in(self.module, inputs, rows, _call_both)

    def _moved(self, tree: Any) -> Any:
        def move(leaf: Tensor) -> Tensor:
            part, there = part_of(leaf), leaf.to(self._mesh.device, non_blocking=True)
            return there if part is None else attach(there, part)

        return map_tensors(move, tree)

    def _cut(self, leaf: Tensor) -> Tensor:
        mine = self._mesh.share(leaf.shape[0])
        part = Part(tuple(leaf.shape), (mine.start, *(0,) * (leaf.dim() - 1)))
        return attach(leaf[mine.start : mine.stop].to(self._mesh.device), part)

    def _tile(self, leaf: Tensor) -> Tensor:
        assert self._tiles is not None
        cut = self._tiles.part(leaf, self._mesh.share(leaf.shape[0]))
        part = part_of(cut)
        assert part is not None
        return attach(cut.to(self._mesh.device), part)

    def _share(self, inputs: Any) -> Share:
        rows = rows_of(inputs, "inputs")
        part = part_of(leaves(inputs)[0])
        if part is not None:
            origin, total = part.origin[0], part.shape[0]
        else:
            counts = row_counts(rows, self._group, self._mesh.device)
            origin, total = sum(counts[: self._group.rank()]), sum(counts)
        if total == 0:
            raise UsageError("the batch is empty on every rank: a step needs at least one sample")
        joint = self._group if self._joint and self._group.size() > 1 else None
        return Share(rows, origin, total, self.seed, self.steps, joint)

    # ---- the user's names: those of the plain net

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The plain net's state_dict, with its own keys; on a `pipe` axis what this rank holds of it."""
        return _real(self.module.state_dict(*args, **kwargs))

    def full_state_dict(self) -> dict[str, Any]:
        """The plain net's whole state_dict, on every rank. Collective where there is a `pipe` axis."""
        state = self.module.state_dict()
        return state if self._stages is None else dict(self._stages.everywhere(state))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a state_dict of the plain net, of which each rank takes what it holds."""
        held_elsewhere = {
            name: value
            for name, value in self.module.state_dict().items()
            if name in state_dict and isinstance(value, Tensor) and value.is_meta
        }
        return self.module.load_state_dict({**state_dict, **held_elsewhere}, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain net's parameters under their own names; on a `pipe` axis those that this rank holds."""
        return iter(_real(dict(self.module.named_parameters(*args, **kwargs))).items())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain net's buffers under their own names; on a `pipe` axis those that this rank holds."""
        return iter(_real(dict(self.module.named_buffers(*args, **kwargs))).items())

    @property
    def stages(self) -> PipelinedNet | None:
        """How the net lies on the `pipe` axis; None if there is none."""
        return self._stages


def _real(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without what another rank holds."""
    return {
        name: value
        for name, value in tensors.items()
        if not (isinstance(value, Tensor) and value.is_meta)
    }


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _nothing(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)


def _call_both(function: Callable[..., Any], inputs: Any) -> Any:
    args, kwargs = inputs
    return function(*args, **kwargs)


def _run_or_stand_in(
    function: Callable[..., Any], inputs: Any, rows: int, call: Callable[..., Any]
) -> Any:
    if rows:
        return call(function, inputs)
    outputs = call(function, map_tensors(stand_in, inputs))
    return map_tensors(lambda leaf: leaf[:0] if leaf.dim() else leaf, outputs)
