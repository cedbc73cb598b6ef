"""`parallelize` and the object it returns.

step(x, y):   weights of all targets  ─────────────┐ (summed over ranks while forward runs)
              outputs = net(x)   batch norm, dropout: intercept
              share   = own numerator / weight of all ranks' targets        losses
              loss    = sum of shares, and gradients: while backward runs   reduce
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.launch.progress import own_progress
from fivefold.mesh import Mesh
from fivefold.mesh.agreement import position_of
from fivefold.mesh.duty import help_instead
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel import bare
from fivefold.parallel.alike import check_alike
from fivefold.parallel.batches import Batches
from fivefold.parallel.exchange import row_counts
from fivefold.parallel.gathering import check_shard, gathering_reducer
from fivefold.parallel.given import given
from fivefold.parallel.intercept import Share, exact, watched_modules
from fivefold.parallel.loss_parameters import loss_parameters
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.memory.model import StepMemory
from fivefold.parallel.modes import evaluating, sums_of
from fivefold.parallel.one_copy import OneCopy, one_copy
from fivefold.parallel.parameter_hooks import ParameterHooks
from fivefold.parallel.pipeline.batch import Batch, some_rows
from fivefold.parallel.pipeline.net import PipelinedNet, pipelined
from fivefold.parallel.pipeline.shards import ShardedStages
from fivefold.parallel.program.loss import TileLoss, whole_outputs
from fivefold.parallel.program.memory import Predicted
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Outputs, Prepared
from fivefold.parallel.program.table import table
from fivefold.parallel.reduce import Alone, Reducer, reducer_for
from fivefold.parallel.refuse import (
    check_compiled,
    check_loss,
    check_method,
    check_net,
    check_scaler,
    net_of,
    refuse_joint,
    uncompiled,
)
from fivefold.parallel.room import check_room
from fivefold.parallel.rows import Rows
from fivefold.parallel.trained import check_given, check_trained
from fivefold.parallel.trees import Method, leaves, map_tensors, rows_of, stand_in
from fivefold.parallel.turns.net import TurnedNet, turned
from fivefold.parallel.wrapped import Wrapped
from fivefold.plan import AXES
from fivefold.trace import Phase, Tag, span

__all__ = ["ParallelModel", "parallelize"]

_SELDOM = 256
"""steps from one comparison of batches to the next where each would be a message of its own"""


def parallelize(
    net: nn.Module | Callable[..., Any],
    mesh: Mesh,
    *,
    example: object = None,
    loss: Callable[..., Any] | None = None,
) -> ParallelModel:
    """Make a plain net compute over the whole mesh what it would compute in one process.

    The net is moved to `mesh.device`; its parameters and buffers are made equal to the first replica's. It
    stays as it is, under `.module`, and so do the keys of its state_dict.

    Args:
        net: any `nn.Module`. One that `torch.compile` was given as a whole is taken as it was before, and
            compiled as with `parallel.compile`. Or a method of one, such as `net.decode`, which is called
            in place of its forward then.
        mesh: what `fivefold.start` returned.
        example: inputs with the shapes of the global batch, meta tensors will do. With tile axes the plan
            for this shape is made at once, so that what cannot be computed in tiles is told before training.
            A layout with a `pipe` axis needs it: the net is cut for these shapes.
        loss: `loss(outputs, targets) -> scalar`, a loss of torch's, or any callable; see `losses`.

    Raises:
        PlanError: the plan's schedule, micro-batches or stages do not go together, or not with the net.
        UsageError: the net is scripted, already wrapped, not yet initialised, or compiled in part; there is
            no example for a layout with a `pipe` axis; or ranks were given different things.
    """
    check_compiled(mesh.plan)
    net, method = net_of(net, mesh.plan)
    net, compiled = uncompiled(net, mesh.plan.memory)
    check_net(net, mesh.layout.data)
    check_loss(loss)
    check_shard(net, mesh)
    if mesh.size > 1:
        lines = given(net, mesh, example, loss)
        mesh.agreement.check([(method, "the method"), *lines], "the arguments of parallelize")
        check_room(net, mesh)
    compiles = compiled or mesh.plan.parallel.compile
    net = net.to(mesh.device)
    model = ParallelModel(net, mesh, loss, example, compiles=compiles, method=method)
    if example is not None and (mesh.layout.tiles > 1 or mesh.plan.tiles.by_turns):
        model.tile_plan(example)
    return model


class ParallelModel(Wrapped):
    """A net on a mesh. Call it for outputs, `step` for a training step; `.module` is the user's net."""

    _one_copy: OneCopy | None = None  # of the weights, if instances of this device share them

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        loss: Callable[..., Any] | None,
        example: object = None,
        *,
        compiles: bool = False,
        method: str = "",
    ) -> None:
        super().__init__()
        self.module, self._call = net, Method(method)
        self.steps = 0
        """number of `step` calls so far: random masks are a function of it"""
        self.samples = 0
        """samples of the whole batches that `step` was given so far"""
        self.seed = mesh.plan.numerics.seed
        self._epoch = 0
        """the latest whose batches were seen: when it changes, the net is recorded again"""
        self._mesh = mesh
        self._group = mesh.group("data")
        self._of_loss = loss_parameters(loss, net, mesh)
        modules = [one for one in (net, loss) if isinstance(one, nn.Module)]
        before = dict(net.named_parameters())
        self._loss = None if loss is None else SharedLoss(loss, mesh, net)
        self._watched = watched_modules(net)
        self._turns = turned(net, mesh, self._loss)
        turns = self._turns is not None
        self._hooks = ParameterHooks(*modules) if mesh.size > 1 or turns else None
        joined = mesh.layout.data > 1 and mesh.layout.pipe * mesh.layout.tiles == 1 and not turns
        self._rows = Rows(net, mesh) if joined and mesh.plan.parallel.rows == "auto" else None
        """finds out whether samples depend on each other, where replicas call the net itself"""
        self._apart = joined and self._rows is None
        """whether no step has ranks tell each other what they are going to do"""
        self._stages = pipelined(net, mesh, example, loss) if mesh.layout.pipe > 1 else None
        staged = self._stages is not None
        self.placeholder = nn.Parameter(torch.zeros(1, device=mesh.device)) if staged else None
        self._tiles = _tiles_of(net, mesh, self._turns or self._stages)
        self._batches = Batches(mesh, self._tiles)
        self._tile_loss = _in_tiles(self._loss, self._tiles)
        self._joined_loss = _in_tiles(self._loss, self._rows.tiles if self._rows else None)
        self._memory = StepMemory(
            net, mesh, None if turns else self._loss, self._tiles, self._stages, compiles=compiles
        )
        self._everyone = mesh.group("data", *TILE_DIMS)
        self.on_outputs: Callable[[Any], None] | None = None
        """called in every step with what the net returned for this rank's part: for metrics of training"""
        # In a tuple, so that neither the reducer nor what it wraps is a submodule of ours.
        self._reducer = (self._own_reducer(net),)
        if staged or (mesh.plan.memory.shard != "none" and mesh.layout.data > 1):
            refuse_joint(net, before, staged=staged)
        self._one_copy = one_copy(self, mesh)

    def _own_reducer(self, net: nn.Module) -> Reducer:
        """Who completes the gradients. Collective."""
        mesh, share_buffers = self._mesh, self._mesh.plan.parallel.batch_norm == "replica"
        if self._turns is not None:
            return Alone()  # it sums gradients itself
        if self._stages is not None:
            return ShardedStages(self._stages.gradients.values())
        if mesh.layout.data * mesh.layout.tiles == 1:
            return Alone()
        gathering = gathering_reducer(net, mesh, share_buffers)
        if gathering is not None:
            return gathering
        # Apart from batch norm: buckets leave when they are full, which ranks that use different parameters
        # see at different times, and a group matches messages by their order.
        return reducer_for(net, mesh.own_group("data", *TILE_DIMS), share_buffers=share_buffers)

    # ---- one training step

    def step(self, inputs: Any, targets: Any = None, scaler: Any = None) -> Tensor:
        """Forward and backward over the whole mesh; gradients are complete on return.

        Args:
            inputs: this rank's samples, as the loader or `shard` gave them: a pytree of tensors (rows, ...).
                A tuple is positional arguments, a dict keyword arguments of the net. Tensors that carry no
                note of their part are this rank's share, in rank order, and the counts are exchanged.
                Ranks of a `pipe` axis that hold no first stage may pass None for a batch like the example.
            targets: what the loss compares with; samples on the leading dim. None will do where there is no
                last stage, and for a loss that compares with nothing.
            scaler: a `torch.amp.GradScaler`, which then scales what backward starts from.

        Returns the loss of the whole batch, a scalar, detached; it travels with the gradients.
        Repeated calls accumulate gradients. Autocast is honoured in forward.

        Raises:
            UsageError: no loss was given, or gradients are switched off; the batch is empty on all ranks, or
                its tensors do not share their leading dim; or ranks were given different batches, or made
                their loaders differently.
        """
        if self._mesh.role == "helper":
            help_instead()
        if self._loss is None:
            raise UsageError("step needs a loss: parallelize(net, mesh, loss=criterion)")
        if not torch.is_grad_enabled():
            raise UsageError(
                "step computes gradients, and here torch.no_grad() or inference_mode() forbids that: use "
                "model.evaluate(x, y, score), or model(x)"
            )
        check_scaler(scaler)
        own_progress().stepped()
        self._rest()
        if self._mesh.size > 1:
            check_given(inputs, targets)
        inputs, targets = self._batches.moved(inputs), self._batches.moved(targets)
        if self._stages is not None and inputs is None:
            inputs = self._stages.stand_in()
        check_alike(self.module, self._everyone, self.steps + 1)
        share = self._share(inputs, targets, told_as="model.step")
        if self._apart and self.steps % _SELDOM == 0:
            self._mesh.agreement.same(self.steps)
        self.steps, self.samples = self.steps + 1, self.samples + share.total
        of_loss = self._of_loss
        with (
            nullcontext(share.hooked) if self._hooks is None else self._hooks.once() as share.hooked
        ):
            if of_loss is not None:
                of_loss.begin()
            with self._memory.step(inputs, targets, share):
                if self._stages is not None:
                    return self._step_in_stages(self._stages, inputs, targets, share, scaler)
                loss = self._stepped(inputs, targets, share, scaler)
            if of_loss is not None:
                of_loss.finish(counted=share.rows > 0 or not self._loss.shares)
            return loss

    def _stepped(self, inputs: Any, targets: Any, share: Share, scaler: Any) -> Tensor:
        """A step without stages, but for the hooks of parameters and what the loss trains."""
        assert self._loss is not None
        if self._turns is not None:
            scaled = _as_it_is if scaler is None else scaler.scale
            batch = Batch(self._call, inputs, share)
            return self._turns.step(batch, targets, scaled, self.on_outputs)
        if self._memory.recorded is not None:
            return self._step_in_tiles(*self._memory.recorded, inputs, targets, share, scaler)
        if self._tiles is not None:
            assert self._tile_loss is not None
            return self._step_in_tiles(self._tiles, self._tile_loss, inputs, targets, share, scaler)
        if self._rows is not None and self._rows.meet(self._call, inputs, share):
            assert self._joined_loss is not None
            self._check_shards(self._rows.found or "the net")
            tiles = self._rows.tiles
            return self._step_in_tiles(tiles, self._joined_loss, inputs, targets, share, scaler)
        weight = self._loss.begin(targets)
        with exact(self._watched, share) as mode, self._memory.children():
            with span(Phase.FORWARD):
                self._reducer[0].begin()
                with mode:
                    outputs = self._reducer[0].forward(
                        lambda: self._or_stand_in(inputs, share.rows, self._call), step=True
                    )
                if self.on_outputs is not None:
                    self.on_outputs(outputs)
                rows = self._rows if self._loss.split is None else None  # else nothing is gathered
                lie = None if rows is None else rows.outputs_lie()
                own = self._loss.share(outputs, targets, weight, share.rows, share.total, lie=lie)
            self._check_trained(own, inputs, targets)
            # Still within `exact`: what is checkpointed runs again during backward.
            with span(Phase.BACKWARD), torch.autocast(self._mesh.device.type, enabled=False):
                scaled = _as_it_is if scaler is None else scaler.scale
                return self._reducer[0].backward(own, scaled, counted=share.rows > 0)

    def _check_trained(self, own: Tensor, inputs: Any, targets: Any) -> None:
        """Refuse a share of the loss that trains others than the net and the loss; looked at now and then."""
        seldom = self.steps > 2 and self.steps % _SELDOM
        if self._mesh.size == 1 or seldom or self._mesh.plan.memory.shard == "parameters":
            return
        of_loss = self._loss.loss if self._loss is not None else None
        modules = [one for one in (self.module, of_loss) if isinstance(one, nn.Module)]
        parameters = (parameter for one in modules for parameter in one.parameters())
        check_trained(own, [*parameters, *leaves(inputs), *leaves(targets)])

    def _check_shards(self, found: str) -> None:
        if self._mesh.plan.memory.shard == "parameters":
            raise UsageError(
                f"samples depend on each other in {found}, or draw their random numbers together, which "
                'memory.shard = "parameters" cannot compute over all replicas: use "optimizer", or vouch for '
                'them with parallel.rows = "apart"'
            )

    def _step_in_tiles(  # noqa: PLR0917 - what step has found out
        self,
        tiles: RecordedNet,
        loss: TileLoss,
        inputs: Any,
        targets: Any,
        share: Share,
        scaler: Any,
    ) -> Tensor:
        assert self._loss is not None
        cut = loss.in_tiles(targets)
        weight = self._loss.begin(targets, self._everyone if cut else None)
        with span(Phase.FORWARD):
            self._reducer[0].begin()
            outputs = self._reducer[0].forward(
                lambda: tiles.run(self._call, inputs, share), step=True
            )
            if self.on_outputs is not None:
                self.on_outputs(tiles.own(outputs))
            own = loss.share(outputs, targets, weight, share)
        self._check_trained(own, inputs, targets)
        with span(Phase.BACKWARD), torch.autocast(self._mesh.device.type, enabled=False):
            scaled = _as_it_is if scaler is None else scaler.scale
            return self._reducer[0].backward(own, scaled, counted=outputs.samples.rows > 0)

    def _step_in_stages(
        self, stages: PipelinedNet, inputs: Any, targets: Any, share: Share, scaler: Any
    ) -> Tensor:
        assert self._loss is not None
        loss, tile_loss = self._loss, self._tile_loss
        assert tile_loss is not None
        weight = None
        if stages.ends:
            if targets is None and loss.split is not None:
                raise UsageError("this rank holds a last stage, so step needs the targets")
            weight = loss.begin(targets, self._everyone if tile_loss.in_tiles(targets) else None)

        def own(rows: range, ready: Prepared, outputs: Outputs) -> tuple[Tensor, Tensor | None]:
            if self.on_outputs is not None:
                self.on_outputs(stages.tiles.own(outputs))
            return tile_loss.of_micro_batch(outputs, some_rows(targets, rows), weight, ready.share)

        scaled = _as_it_is if scaler is None else scaler.scale
        batch = Batch(self._call, inputs, share)
        divided = loss.split is None and loss.shares
        total = stages.step(batch, own, scaled, divided=divided, of_loss=self._of_loss)
        if scaler is not None:
            scaler.scale(total)  # it begins with its first use, which may be on other ranks only
            assert self.placeholder is not None
            stages.agree_on_overflow(self.placeholder)
        if loss.split is None and isinstance(loss.loss, nn.Module):
            stages.share_from_last(loss.loss)
        return total

    def tile_plan(self, example: Any) -> str:
        """The plan of this rank for inputs with the global shapes of `example`, as a table.

        It lists every exchange with its messages and bytes, every operation with what is owned, what is held
        beyond, and what that costs. Collective where replicas divide parameters among them.

        Raises `UsageError` for what cannot be computed in tiles, and for a layout without tile axes.
        """
        tiles = self._tiles if self._turns is None else self._turns.first
        if tiles is None:
            raise UsageError(
                "the layout has no tile axes, so there is no plan of tiles: set height, width or depth"
            )
        with torch.no_grad():  # a net is recorded with its parameters whole
            program = self._reducer[0].forward(
                lambda: tiles.plan_for(example, self._mesh.share, self._call), step=False
            )
        return table(program, tiles.here)

    def memory(self, inputs: Any, targets: Any = None) -> Predicted:
        """How much memory a step on such a batch takes on this rank, told without making it.

        Both are the global batch's, meta tensors will do, or this rank's part, as `step` takes it. Printed,
        the result is a table. Raises `UsageError` without a loss, on the data axis alone without a budget,
        and where memory depends on the numbers in the batch.
        """
        return self._memory.told(inputs, targets)

    def shard(self, *trees: Any) -> Any:
        """This rank's part of a batch that every rank holds whole; a tuple if several trees are given.

        The first tree, the inputs, is cut into tiles as well. Targets keep their pixels: they are laid as the
        outputs lie, which only the step knows.
        """
        mine = self._batches.shard(trees)
        return mine[0] if len(mine) == 1 else mine

    def whole(self, tree: Any) -> Any:
        """Tiles, as a loader of windows yields them and the model returns them, put together: whole images of
        this replica's samples, without gradients.

        Collective over the tiles of a replica. Other tensors, and all where there are no tiles, stay as
        they are.
        """
        return tree if self._tiles is None else whole_outputs(self._tiles, tree)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs for this rank's samples. In training mode, batch statistics are the mesh's.

        With a `pipe` axis all of its ranks get the outputs, without gradients.
        """
        return self._outputs(Method(self._call.name, both=True), args, kwargs)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the net returns, such as "decode", as calling the model is to its forward.

        It is recorded like the forward, of which it shares parameters, buffers, and what one call leaves in
        attributes for the next. Raises `UsageError` if there is none, and with a `pipe` axis.
        """
        check_method(self.module, method, self._mesh.plan)
        return self._outputs(Method(method, both=True), args, kwargs)

    def _outputs(self, call: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = self._batches.moved((args, kwargs))
        forward = functools.partial(self._reducer[0].forward, step=False)
        if not leaves(inputs):
            return forward(lambda: call(self.module, (args, kwargs)))
        if self._stages is not None:
            if self.training:
                raise UsageError(
                    "with a pipe axis model.step(x, y) trains, which computes the loss too and hands outputs "
                    "to `on_outputs`; to evaluate, call model.eval() first"
                )
            stages, share = self._stages, self._share(inputs, draws=False)
            outputs = forward(lambda: stages.outputs(Batch(call, inputs, share)))
            return bare.refused(stages.tiles.own(outputs), "a pipe axis has no graph of the net")
        if self._turns is not None:
            turns, share = self._turns, self._share(inputs, draws=False)
            outputs = turns.tiles.own(turns.run(Batch(call, inputs, share)))
            return bare.refused(
                outputs, "images that are computed by turns have no graph of the net"
            )
        if self._tiles is not None:
            tiles, share = self._tiles, self._share(inputs, draws=self.training)
            outputs = tiles.own(forward(lambda: tiles.run(call, inputs, share)))
            return bare.refused(
                outputs, "each rank has its tile of the outputs, and the loss of all"
            )
        if self._rows is not None:
            shared = self._batches.is_shared(inputs)
            alone = (
                self._share(inputs)
                if shared
                else self._batches.share_alone(inputs, self.seed, self.steps)
            )
            self._rows.check_apart(call, inputs, alone, norms=self.training)
        rows = rows_of(inputs, "inputs")
        if self.training:
            share = self._share(inputs, draws=False)
            self._reducer[0].begin()
        else:
            share = self._batches.share_alone(inputs, self.seed, self.steps)
        weight = self._weight(rows, share.bounds if self.training else None)
        weighing = bare.Weighing(weight, self.module)
        if self._group.size() > 1:
            inputs = weighing.entered(inputs)
        with exact(self._watched, share) as mode, mode:
            outputs = forward(lambda: self._or_stand_in(inputs, rows, call))
        return self._averaged(outputs, weighing)

    def _weight(self, rows: int, bounds: Sequence[int] | None = None) -> Callable[[], float]:
        """How much a mean over `rows` samples counts; `bounds` are those of all shares, if known."""
        replicas = self._group.size()

        @functools.cache
        def weight() -> float:
            total = bounds[-1] if bounds else sum(row_counts(rows, self._group, self._mesh.device))
            return rows * replicas / total

        return weight

    def _averaged(self, outputs: Any, weighing: bare.Weighing) -> Any:
        """Outputs of some samples, ready for a bare `loss.backward()`."""
        trains = any(leaf.requires_grad for leaf in leaves(outputs))
        if self._group.size() == 1 or not trains:
            return outputs
        if self._of_loss is not None:
            return bare.refused(
                outputs, "the parameters of the loss would get the gradients of this rank alone"
            )
        if self._hooks is not None and self._hooks:
            return bare.refused(
                outputs,
                "hooks of parameters would see the gradients of this rank, not of the whole batch",
            )
        return weighing.left(outputs)

    @torch.no_grad()
    def evaluate(
        self, inputs: Any, targets: Any, score: Callable[[Any, Any], Tensor], *, join: bool = True
    ) -> Tensor:
        """The sums of `score(outputs, targets)` over the whole batch, in evaluation mode. Collective.

        Every sample is scored once, with all of its pixels, under every layout: what the net returns is put
        together on one rank of each replica, and the sums of replicas are added.

        Args:
            inputs: as for `step`.
            targets: what `score` compares with; samples on the leading dim, this rank's, or tiles of them.
            score: (outputs, targets) of some samples to sums, (sums,) float64, such as [loss, correct,
                samples].
            join: whether sums are added over ranks. Without it, those that this rank adds.

        Returns (sums,), float64; equal on all ranks if joined.
        """
        own_progress().alive()
        with evaluating(self):
            outputs, counts = self._whole_outputs(inputs, targets)
        targets = self.whole(self._batches.moved(targets))
        sums = score(outputs, targets) if counts else None
        width = torch.tensor([0 if sums is None else len(sums_of(sums))], device=self._mesh.device)
        if join:
            width = comm.all_gather(width, self._mesh.group(*AXES), Tag.CONTROL).max()
        found = torch.zeros(int(width), dtype=torch.float64, device=self._mesh.device)
        if sums is not None:
            found += sums.detach()
        return comm.all_reduce(found, self._mesh.group(*AXES), Tag.LOSS) if join else found

    def _whole_outputs(self, inputs: Any, targets: Any) -> tuple[Any, bool]:
        """Outputs of all of this replica's samples, and whether this rank is the one that has them."""
        inputs = self._batches.moved(inputs)
        forward = functools.partial(self._reducer[0].forward, step=False)
        share = self._share(inputs, targets, draws=False, told_as="model.evaluate")
        first = all(self._mesh.coordinate(axis) == 0 for axis in ("pipe", *TILE_DIMS))
        first = first and share.rows > 0
        if self._stages is not None:
            stages = self._stages
            outputs = forward(lambda: stages.outputs(Batch(self._call, inputs, share)))
            return stages.tiles.own(outputs, whole=True), first
        if self._turns is not None:
            outputs = self._turns.run(Batch(self._call, inputs, share))
            return self._turns.tiles.own(outputs, whole=True), first
        meets = self._rows is not None and self._rows.meet(self._call, inputs, share)
        tiles = self._rows.tiles if self._rows is not None and meets else self._tiles
        if tiles is not None:
            outputs = forward(lambda: tiles.run(self._call, inputs, share))
            return tiles.own(outputs, whole=True), first
        with exact(self._watched, share) as mode, mode:
            return forward(lambda: self._or_stand_in(inputs, share.rows, self._call)), first

    def _or_stand_in(self, inputs: Any, rows: int, call: Callable[..., Any]) -> Any:
        """What the net returns for some samples; for none, it runs on a stand-in: others wait for it."""
        outputs = call(self.module, inputs if rows else map_tensors(stand_in, inputs))
        if self._rows is not None:
            self._rows.note_left()
        if rows:
            return outputs
        return map_tensors(lambda leaf: leaf[:0] if leaf.dim() else leaf, outputs)

    def _share(
        self, inputs: Any, targets: Any = None, *, draws: bool = True, told_as: str = ""
    ) -> Share:
        position = position_of([*leaves(inputs), *leaves(targets)])
        self._mesh.agreement.position = position
        if position is not None and position.epoch > self._epoch:
            self._epoch = position.epoch
            rows = self._rows.tiles if self._rows is not None else None
            for tiles in (self._tiles if self._turns is None else self._turns.first, rows):
                if tiles is not None:
                    tiles.programs.look_again()
        return self._batches.share(inputs, self.seed, self.steps, draws=draws, told_as=told_as)

    def _rest(self) -> None:
        """Parameters as they are between steps: the optimiser's."""
        self._reducer[0].rest()
        if self._one_copy is not None:
            self._one_copy.rest()

    @property
    def mesh(self) -> Mesh:
        """Where it computes."""
        return self._mesh

    @property
    def stages(self) -> PipelinedNet | None:
        """How the net lies on the `pipe` axis; None if there is none."""
        return self._stages


def _tiles_of(
    net: nn.Module, mesh: Mesh, within: TurnedNet | PipelinedNet | None
) -> RecordedNet | None:
    if within is not None:
        return within.tiles
    return RecordedNet(net, mesh) if mesh.layout.tiles > 1 else None


def _in_tiles(loss: SharedLoss | None, tiles: RecordedNet | None) -> TileLoss | None:
    return None if loss is None or tiles is None else TileLoss(loss, tiles)


def _as_it_is(loss: Tensor) -> Tensor:
    return loss
