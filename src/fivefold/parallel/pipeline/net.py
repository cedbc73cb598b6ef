"""A net whose stages lie on the ranks of the pipe axis.

The net is recorded and cut once, for the shape of the example. Each rank keeps the parameters of its stages;
those of the others become meta tensors, which have a shape and no memory. Tiles and replicas are the other
axes: a stage computes its tile as a net without stages does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, owned
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.intercept import Share
from fivefold.parallel.loss_parameters import LossParameters
from fivefold.parallel.pipeline.batch import Batch, Schedules, some_rows
from fivefold.parallel.pipeline.cut import MEASURED, Cut, balanced, named
from fivefold.parallel.pipeline.describe import described
from fivefold.parallel.pipeline.gradients import StageGradients
from fivefold.parallel.pipeline.held import everywhere, released
from fivefold.parallel.pipeline.run import Feed, Step
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.shards import StageShards
from fivefold.parallel.pipeline.stages import (
    Stage,
    check_holders,
    check_hooks,
    check_set,
    check_writers,
    divided,
    holders,
)  # fmt: skip
from fivefold.parallel.pipeline.statistics import (
    Notes,
    check_counted,
    check_effects,
    check_linear,
    check_norms,
    check_values,
)
from fivefold.parallel.pipeline.timing import agreed_node_s
from fivefold.parallel.pipeline.wires import Wire
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Outputs, Prepared
from fivefold.parallel.program.program import Program
from fivefold.parallel.sharded import joint_norm, local
from fivefold.parallel.torch_losses import split_loss
from fivefold.parallel.trees import call_with, leaves, map_tensors
from fivefold.plan import AXES
from fivefold.trace import Tag

__all__ = ["PipelinedNet", "pipelined"]


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PipelinedNet:
    """The user's net on a pipe axis. Creating it is collective; it takes over the first rank's weights.

    `costs` are measured if need be, and the net is cut as the plan says, unless they are given. Raises
    `UsageError` or `PlanError` for what cannot be cut as the plan says.
    """

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        example: Any,
        costs: Costs | None = None,
        cut: Cut | None = None,
        *,
        loss: object = None,
    ) -> None:
        held = [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]
        comm.broadcast_all(held, mesh.group(*AXES), Tag.GRADIENTS)
        self._net, self._mesh, self._example = net, mesh, _shapes(example)
        self.rank = mesh.coordinate("pipe")
        self._names = _names(net)
        self._dtypes: dict[tuple[Any, ...], torch.dtype] = {}
        """of the loss, with and without autocast"""
        self.tiles = RecordedNet(net, mesh, costs)
        self.schedules = Schedules(mesh)
        """by size of the batch"""
        self.schedule = self.schedules.usual
        tape = self._tape()
        check_counted(tape, self.schedule.micro_batches)
        self.cut = self._cut(tape) if cut is None else cut
        self._writers: dict[str, int] = {}
        """where a forward leaves something -> the stage that does"""
        self._divided: dict[int, tuple[Program, list[Stage]]] = {}
        self.holders = holders(net, tape, self.cut)
        """parameter or buffer -> the stages that use it"""
        paired = self.schedule.chains > 1
        if paired:
            check_norms(net)
        chains = range(self.schedule.chains)
        channels_last = mesh.plan.numerics.memory_format == "channels_last"
        # All ranks make the same groups in the same order.
        self._wires = {
            (chain, back): Wire(mesh.own_group("pipe"), mesh.device, channels_last)
            for chain in chains
            for back in (False, True)
        }
        axes = ("data", *TILE_DIMS)
        held = self.schedule.stages_of(self.rank)
        groups = [
            mesh.pair_group(*axes) if paired else mesh.own_group(*axes)
            for _ in range(2 if paired else mesh.plan.pipeline.stages_per_rank)
        ]
        opposite = mesh.pair_group() if paired else None
        self._opposite = None if opposite is None or opposite.size() == 1 else opposite
        keep = {name for name, stages in self.holders.items() if not held.isdisjoint(stages)}
        of_loss = {id(b) for b in loss.buffers()} if isinstance(loss, nn.Module) else set[int]()
        released(net, keep | {name for name, b in net.named_buffers() if id(b) in of_loss})
        shards = mesh.plan.memory.shard != "none" and mesh.layout.data > 1
        self._replicas = mesh.own_replicas() if shards else None
        self.gradients = {
            stage: self._gradients(stage, group)
            for stage, group in zip(sorted(held), groups, strict=False)
        }
        self._tied = self._gradients_of_tied()
        self._notes = {stage: Notes() for stage in held} if paired else {}
        self._joint = mesh.plan.parallel.batch_norm == "global"

    # ---- what lies where

    def __str__(self) -> str:
        return described(self._net, self._tape(), self.cut, self.schedule)

    @property
    def begins(self) -> bool:
        """Whether this rank holds a first stage, which takes the inputs."""
        return 0 in self.schedule.stages_of(self.rank)

    @property
    def ends(self) -> bool:
        """Whether this rank holds a last stage, which takes the targets."""
        return self.schedule.stages - 1 in self.schedule.stages_of(self.rank)

    def _gradients(self, stage: int, group: dist.ProcessGroup) -> StageGradients:
        if self._replicas is None:
            return StageGradients(functools.partial(self._parameters, stage), group)
        names = [name for name, _ in self._net.named_parameters() if self.holders[name] == (stage,)]
        return StageShards(self._net, names, self._replicas, group)

    def _parameters(self, *stages: int) -> list[nn.Parameter]:
        """The parameters that exactly these stages use."""
        found = self._net.named_parameters()
        return [p for name, p in found if self.holders.get(name) == stages]

    def _gradients_of_tied(self) -> dict[tuple[int, ...], StageGradients]:
        """Of what several stages use, by these; summed over all ranks that hold one of them. Collective."""
        found: dict[tuple[int, ...], StageGradients] = {}
        tied = {self.holders[name] for name, _ in self._net.named_parameters()}
        for stages in sorted(stages for stages in tied if len(stages) > 1):
            ranks = {rank for stage in stages for rank in self.schedule.ranks_of(stage)}
            group = self._mesh.joint_group(ranks, "data", *TILE_DIMS)
            if self.rank in ranks:
                found[stages] = StageGradients(functools.partial(self._parameters, *stages), group)
        return found

    def all_gradients(self) -> list[StageGradients]:
        """Of all parameters that this rank holds."""
        return [*self.gradients.values(), *self._tied.values()]

    def _cut(self, tape: Tape) -> Cut:
        told, stages = self._mesh.plan.pipeline.cut, self.schedule.stages
        ties = self._mesh.plan.memory.shard == "none" or self._mesh.layout.data == 1
        if told == MEASURED:
            found = agreed_node_s(self._net, self._mesh, self._micro_batch(), self.tiles.costs)
            return balanced(tape, stages, node_s=found, ties=ties)
        if told:
            return named(tape, told.split(","), stages, ties=ties)
        return balanced(tape, stages, ties=ties)

    def _tape(self) -> Tape:
        """The net for the smallest micro-batch of the example: all ranks record the same."""
        return self.tiles.recorded(call_with, self._micro_batch())

    def _micro_batch(self) -> Any:
        total = leaves(self._example)[0].shape[0]
        rows = max(total // self._mesh.layout.data // self.schedule.micro_batches, 1)
        return map_tensors(lambda leaf: leaf.new_empty((rows, *leaf.shape[1:])), self._example)

    def _stages(self, program: Program) -> list[Stage]:
        if id(program) not in self._divided:
            found = divided(program, self.cut, self.holders, self.tiles.grid, self.tiles.here.rank)
            check_holders(found, self.holders)
            check_hooks(program, found)
            check_writers(found, self._writers)
            self._check_names()
            self._divided[id(program)] = (program, found)  # kept, so that the id stays its
        return self._divided[id(program)][1]

    def _check_names(self) -> None:
        """Refuse a net that has other parameters than when it was cut: nobody would hold them."""
        if new := sorted(_names(self._net) ^ self._names):
            raise UsageError(
                f"the net has become another one since parallelize: {new[0]!r} has come or gone. Stages hold "
                "what the net had when it was cut: change it first, then call parallelize"
            )

    # ---- running

    def prepare(self, batch: Batch) -> None:
        """Make what stays from step to step for batches like this one: plans, and buckets of gradients."""
        for gradients in self.all_gradients():
            gradients.begin()
        self._feeds(batch, self._micro_batches(batch, self._schedule(batch.share).micro_batches))

    def step(
        self,
        batch: Batch,
        loss: Callable[[range, Prepared, Outputs], tuple[Tensor, Tensor | None]],
        scaled: Callable[[Tensor], Tensor],
        *,
        divided: bool = False,
        of_loss: LossParameters | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are complete on return.

        `loss` gives the share of some of this rank's samples, from what the net returns for them. With
        `divided` it gives a numerator over the number of samples, and this rank's part of the denominator,
        which is known when all is done. `of_loss` are the parameters that it trains besides the net's.
        Returns the sum of all shares, in the dtype of the loss.
        """
        _check_inputs(batch.inputs)
        for gradients in self.all_gradients():
            gradients.begin()
        if not self._joint:
            self._share_buffers()
        schedule = self._schedule(batch.share)
        micros = self._micro_batches(batch, schedule.micro_batches)

        # The loss, its denominator, the number of its dtype, and how many ranks tell it.
        told = torch.zeros(4, dtype=torch.float64, device=self._mesh.device)

        def share(micro: int, ready: Prepared, made: Mapping[int, Tensor]) -> Tensor:
            own, denominator = loss(micros[micro], ready, self.tiles.finish(ready, made))
            if denominator is not None:
                told[1] += denominator
            return own

        step = self._run(schedule, batch, micros, share, scaled, divided=divided)
        if step.total is not None:
            told[0] += step.total.reshape(())
            told[2] += _DTYPES.index(step.total.dtype)
            told[3] += 1
        summed = comm.start_all_reduce(told, self._mesh.group(*AXES), Tag.LOSS)
        scale = batch.share.total / summed.wait()[1] if divided else None
        for gradients in self._tied.values():
            gradients.launch()
        for gradients in self.all_gradients():
            gradients.finish(scale)
        if of_loss is not None:
            of_loss.finish(scale, counted=batch.share.rows > 0 or not divided)
        for notes in self._notes.values():
            notes.apply(self._opposite)
        total, _, number, ranks = summed.wait()
        return self._as_loss(total if scale is None else total * scale, number / ranks)

    def _as_loss(self, total: Tensor, number: Tensor) -> Tensor:
        """In the dtype with that number, which is asked for once: a GPU would be waited for."""
        net = next((p.dtype for p in self._net.parameters()), None)  # may be converted
        key = torch.is_autocast_enabled(self._mesh.device.type), net
        if key not in self._dtypes:
            self._dtypes[key] = _DTYPES[int(number)]
        return total.to(self._dtypes[key])

    def share_from_last(self, loss: nn.Module) -> None:
        """Let all ranks have the buffers of a loss as the rank has them that computes it. Collective."""
        if self.schedule.chains == 1:
            last = self._mesh.layout.pipe - 1
            comm.broadcast_all(
                list(loss.buffers()), self._mesh.group("pipe"), Tag.CONTROL, source=last
            )

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        """What the net returns for this rank's samples, on every rank of the pipe axis."""
        stages, ranks = self.schedule.stages, self.schedule.ranks
        rows = tuple(
            tuple(Action(0, stage, Op.FORWARD, 0) for stage in range(rank, stages, ranks))
            for rank in range(ranks)
        )
        schedule = Schedule("forward", ranks, stages, 1, rows)
        micros = self._micro_batches(batch, 1)
        kept: list[tuple[Prepared, Mapping[int, Tensor]]] = []

        def keep(_micro: int, ready: Prepared, made: Mapping[int, Tensor]) -> Tensor:
            kept.append((ready, made))
            return torch.zeros((), device=self._mesh.device)

        step = self._run(schedule, batch, micros, keep, lambda loss: loss)
        ready = step.feed(0).ready
        gives = step.feed(0).stages[-1].gives
        wire, last = self._wires[0, False], schedule.rank_of(0, stages - 1)
        if kept:
            made = kept[0][1]
            tensors = [made[value.index] for value in gives]
            sent = [wire.send(gives, tensors, peer) for peer in range(ranks) if peer != last]
            outputs = self.tiles.finish(ready, made)
            for messages in sent:
                messages.wait()
        else:
            arrived = wire.expect(gives, last).wait()
            made = {value.index: t for value, t in zip(gives, arrived, strict=True)}
            outputs = self.tiles.finish(ready, made)
        return outputs

    def _run(
        self,
        schedule: Schedule,
        batch: Batch,
        micros: list[range],
        loss: Callable[[int, Prepared, Mapping[int, Tensor]], Tensor],
        scaled: Callable[[Tensor], Tensor],
        *,
        divided: bool = False,
    ) -> Step:
        feeds = self._feeds(batch, micros)
        tape = feeds[0].ready.program.tape
        check_counted(tape, schedule.micro_batches)
        if self._mesh.layout.data == 1 or self._mesh.plan.parallel.batch_norm == "replica":
            for rows, feed in zip(micros, feeds, strict=True):
                if len(rows) == 1:
                    share = len(rows) / feed.ready.moment.rows
                    check_values(feed.ready.program.tape, schedule.micro_batches, share)
        if schedule.chains > 1:
            check_effects(tape)
        if divided:
            check_linear(tape)
        notes = self._notes if schedule.chains > 1 else {}
        step = Step(
            schedule, self.rank, self.tiles, self._wires, feeds.__getitem__, loss, scaled, self.gradients,
            notes,
        )  # fmt: skip
        step.run()
        return step

    def _feeds(self, batch: Batch, micros: list[range]) -> list[Feed]:
        """What every micro-batch is computed from. Collective."""
        parts = [some_rows(batch.inputs, rows) for rows in micros]
        every = self.tiles.prepare(batch.call, parts, batch.share, between=self._leave_ahead)
        return [self._feed(ready) for ready in every]

    def _leave_ahead(self, ready: Prepared) -> None:
        self.tiles.leave_ahead(ready)
        for number, stage in enumerate(self._stages(ready.program)):
            for one in ready.program.tape.effects.sets:
                check_set(one)
                if any(isinstance(r, Value) and r.index in stage.leaves for r in one.refs()):
                    self._writers.setdefault(one.path, number)
                    if one.registered:
                        self.holders.setdefault(one.path, (number,))

    def _feed(self, ready: Prepared) -> Feed:
        recompute = ready.moment.recompute
        if isinstance(recompute, int) and recompute:
            each = max(round(recompute / self.schedule.stages), 1)
            ready = replace(ready, moment=replace(ready.moment, recompute=each))
        return Feed(ready, self._stages(ready.program))

    def _schedule(self, share: Share) -> Schedule:
        largest = max(b - a for a, b in itertools.pairwise(share.bounds))
        return self.schedules.of(share.total, largest)

    def _micro_batches(self, batch: Batch, count: int) -> list[range]:
        """Which of this replica's samples each micro-batch has."""
        return [owned(batch.share.rows, count, number) for number in range(count)]

    def stand_in(self) -> Any:
        """This rank's part of a batch like the example, without numbers.

        Raises `UsageError` on ranks that need them.
        """
        if self.begins:
            raise UsageError("this rank holds a first stage, so step needs the inputs")
        mine = self._mesh.share(leaves(self._example)[0].shape[0])
        return map_tensors(lambda leaf: self.tiles.part(leaf, mine), self._example)

    def everywhere(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Tensors by names of parameters and buffers, of which ranks hold some, on all. Collective."""
        source = {
            name: self.schedule.rank_of(0, stages[0]) for name, stages in self.holders.items()
        }
        like = {
            **dict(self._net.named_parameters(remove_duplicate=False)),
            **dict(self._net.named_buffers(remove_duplicate=False)),
        }
        return everywhere(tensors, like, source, self._mesh.group("pipe"), self._mesh.device)

    def norm(self, order: float) -> Tensor:
        """The norm of all gradients, of which this rank holds some. Collective over those who hold others."""
        own = [
            local(parameter.grad)
            for name, parameter in self._net.named_parameters()
            # What several ranks hold counts once.
            if self.schedule.rank_of(0, self.holders[name][0]) == self.rank
            and parameter.grad is not None
        ]
        holders = ("pipe",) if self._replicas is None else ("data", "pipe")
        return joint_norm(own, order, self._mesh.group(*holders), self._mesh.device)

    def agree_on_overflow(self, placeholder: nn.Parameter) -> None:
        """Let every rank's scaler see that some gradient anywhere is not finite. Collective.

        Where there are no gradients, it sees one of `placeholder`.
        """
        held = [local(p.grad) for p in self._net.parameters() if p.grad is not None]
        if not held:
            placeholder.grad = torch.zeros_like(placeholder)
            held = [placeholder.grad]
        found = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for grad in held:
            found += (~torch.isfinite(grad)).any()
        if comm.all_reduce(found, self._mesh.group(*AXES), Tag.CONTROL).item():
            held[0].fill_(torch.inf)

    def _share_buffers(self) -> None:
        held = [b for b in self._net.buffers() if not b.is_meta]
        comm.broadcast_all(held, self._mesh.group("data", *TILE_DIMS), Tag.GRADIENTS)


def pipelined(
    net: nn.Module, mesh: Mesh, example: Any, loss: Callable[..., Any] | None
) -> PipelinedNet:
    """Cut a net into stages. Raises `UsageError` where the example or the loss does not allow that."""
    if example is None:
        raise UsageError(
            "a layout with a pipe axis needs parallelize(net, mesh, example=x, ...): the net is cut into "
            "stages for the shapes of a global batch; tensors on the meta device will do"
        )
    # Before groups are made: a rank that ends meanwhile breaks the others off.
    if (
        loss is not None
        and Schedules(mesh).usual.micro_batches > 1
        and split_loss(loss) is None
        and not hasattr(loss, "share")
    ):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UsageError(
            f"the loss {name!r} cannot be taken apart into shares of micro-batches: use a loss of torch's on "
            "one tensor, give it a method share(outputs, targets) -> (numerator, denominator), or choose "
            'pipeline.schedule = "layer", which takes the batch at once'
        )
    return PipelinedNet(net, mesh, example, loss=loss)


def _check_inputs(inputs: Any) -> None:
    if any(leaf.requires_grad for leaf in leaves(inputs)):
        raise UsageError(
            "the inputs ask for gradients, which stages do not hand back to whoever gave them: detach them, "
            "or use a layout without a pipe axis"
        )


def _names(net: nn.Module) -> set[str]:
    return {name for name, _ in net.named_parameters()}


def _shapes(example: Any) -> Any:
    return map_tensors(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), example
    )
