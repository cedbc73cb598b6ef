"""A net whose tiles one process computes by turns.

Turns divide what the tile axes give to a process, so that the two multiply:

    height=2 and two turns along it      rows of rank 0 | rows of rank 1
                                         turn 0, turn 1 | turn 0, turn 1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh, Part, attach, part_of
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.graph.marked import is_pointwise
from fivefold.parallel.graph.names import is_users
from fivefold.parallel.graph.refs import StateRef
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.intercept import Share
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.norms import uses_batch
from fivefold.parallel.pipeline.batch import Batch
from fivefold.parallel.pipeline.gradients import StageGradients
from fivefold.parallel.program.costs import Costs, measured_processor
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Outputs, Prepared
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.spread import Division, Spread
from fivefold.parallel.reduce import without_effect
from fivefold.parallel.trained import check_trained
from fivefold.parallel.trees import flatten, leaves, map_tensors, unflatten
from fivefold.parallel.turns.budget import TurnBudget
from fivefold.parallel.turns.segments import segments_of
from fivefold.parallel.turns.shelf import Shelf
from fivefold.parallel.turns.step import Step, TurnUnderWay
from fivefold.parallel.turns.views import View, more_turns, views_of
from fivefold.torch_private import version_of
from fivefold.trace import Tag

__all__ = ["TurnedNet", "turned"]

_VISIT_S = 5e-4
"""what a turn takes to stop and to go on, beside what it computes"""


def turned(net: nn.Module, mesh: Mesh, loss: SharedLoss | None) -> TurnedNet | None:
    """A net by turns, if the plan has some. Collective then.

    Raises `PlanError` for a plan with which turns do not go.
    """
    plan = mesh.plan
    if not plan.tiles.by_turns:
        return None
    problems = {
        "a pipe axis": plan.layout.pipe > 1,
        f'memory.shard = "{plan.memory.shard}"': plan.memory.shard != "none",
        f"memory.recompute = {plan.memory.recompute!r}": plan.memory.recompute not in {0, "none"},
        "parallel.compile": plan.parallel.compile,
        'parallel.batch_norm = "replica"': plan.parallel.batch_norm == "replica",
    }
    for what, there in problems.items():
        if there:
            raise PlanError(
                f"tiles.turns = {plan.tiles.turns!r} does not go with {what}: use one of them"
            )
    if plan.tiles.turns == "auto" and not plan.memory.budget:
        raise PlanError(
            'tiles.turns = "auto" makes as few as memory.budget allows: set one, such as 24GiB, or say how '
            'many, such as "height=4,width=4"'
        )
    return TurnedNet(net, mesh, loss)


class TurnedNet:
    """The user's net. Creating it is collective: it makes groups.

    Where the plan leaves their number open, a batch has as few turns as its budget allows. Within a budget,
    layers share an exchange as where memory is plenty, if all that is kept then has room, and else more do.

    Raises `UsageError` where turns do not go together with the rest of the plan.
    """

    def __init__(self, net: nn.Module, mesh: Mesh, loss: SharedLoss | None) -> None:
        self._net, self._mesh, self._loss = net, mesh, loss
        held = [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]
        self._group = mesh.own_group("data", *TILE_DIMS)
        comm.broadcast_all(held, self._group, Tag.GRADIENTS)
        self._gradients = StageGradients(lambda: [*net.parameters()], self._group)
        self.tiles = RecordedNet(net, mesh, Costs())
        """the tiles of processes, each as a whole"""
        self._budget = TurnBudget(net, mesh) if mesh.plan.memory.budget else None
        self._plenty, self._scarce = self._measured()
        self._known_views: dict[Any, list[View]] = {}
        """by turns and whether memory is scarce"""
        self._within: dict[Any, list[View]] = {}
        """under a budget, by what batches are like"""
        self._views = self._views_by(mesh.plan.tiles.turns_by_axis(), self._plenty)

    def _views_by(self, turns: Mapping[str, int], costs: Costs) -> list[View]:
        """Those of this process, found once. Collective."""
        key = *sorted(turns.items()), costs
        if key not in self._known_views:
            joint = self.tiles.grid.data is not None
            self._known_views[key] = views_of(
                self._net, self._mesh, turns, costs, joint=joint, loss=self._loss
            )
        return self._known_views[key]

    def _measured(self) -> tuple[Costs, Costs]:
        """What plans go by where memory is plenty, and where it is scarce. Collective: all make the same."""
        flops_per_s, copied = measured_processor(self._mesh.device)
        kept = copied if self._budget is None else min(copied, self._budget.keeps_bytes_per_s)
        told = torch.tensor([flops_per_s, copied, kept], device=self._mesh.device)
        comm.broadcast_all([told], self._group, Tag.CONTROL)
        flops_per_s, *rates = told.tolist()
        plenty, scarce = (Costs(_VISIT_S, rate, flops_per_s, rate) for rate in rates)
        return plenty, scarce

    @property
    def first(self) -> RecordedNet:
        """The net as the first turn of this process computes it."""
        return self._views[0].net

    # ---- running

    def run(self, batch: Batch) -> Outputs:
        """This process's part of what the net returns, without gradients. Collective."""
        with torch.no_grad():
            step = self._prepared(batch)
            outputs = self._together(step.outputs(), step.ready)
            self.first.leave(step.ready, {})
            return outputs

    def step(
        self,
        batch: Batch,
        targets: Any,
        scaled: Callable[[Tensor], Tensor],
        on_outputs: Callable[[Any], None] | None,
    ) -> Tensor:
        """Forward and backward; gradients are complete on return. Returns the loss, detached. Collective.

        `on_outputs` is called with what the net returned for this process's part.
        """
        step, loss, share = self._prepared(batch, leaves(targets)), self._loss, batch.share
        losses = [view.loss for view in self._views]
        assert loss is not None
        cut = losses[0] is not None and losses[0].in_tiles(targets)
        weight = loss.begin(targets, self._group if cut else None)
        modules = [one for one in (self._net, loss.loss) if isinstance(one, nn.Module)]
        parameters = [p for one in modules for p in one.parameters()]

        def own(turn: int, outputs: Outputs) -> Tensor:
            view, tiled = self._views[turn], losses[turn]
            assert tiled is not None
            mine = map_tensors(functools.partial(self._tile_of_tile, view.net), targets)
            found = tiled.share(outputs, mine, weight, share)
            if not turn and found.requires_grad:
                known = (*parameters, *leaves(batch.inputs), *leaves(targets), *step.cut(turn))
                check_trained(found, known)
            return found

        kind = tuple((leaf.shape, part_of(leaf)) for leaf in leaves(targets))
        before = _state_of(loss.loss)
        self._gradients.begin()
        counted = step.ready.samples.rows > 0  # of the grid: who has none may compute another's
        with without_effect(() if counted else self._net.parameters()):
            total, outputs = step.train(own, scaled, kind, keep=on_outputs is not None)
        self._gradients.launch()
        self._gradients.finish()
        self.first.leave(step.ready, {})
        _check_loss(before, _state_of(loss.loss))
        if on_outputs is not None:
            on_outputs(self.tiles.own(self._together(outputs, step.ready)))
        if not counted:
            total.zero_()
        return comm.all_reduce(total, self._group, Tag.LOSS)

    def _prepared(self, batch: Batch, beside: Sequence[Tensor] = ()) -> Step:
        """A step on a batch; `beside` it, there are other tensors."""
        inputs = map_tensors(functools.partial(self._noted, share=batch.share), batch.inputs)
        batch = replace(batch, inputs=inputs)
        if self._budget is not None:
            self._views = self._views_within(self._budget, batch, beside)
        every = self._every_ready(batch)
        state = self.first.state(every[0])
        programs = [one.program for one in every]
        shelf, whole = self._shelf(programs, [*leaves(inputs), *beside], state)
        turns = [
            self._under_way(*each, state, shelf)
            for each in zip(self._views, every, whole, strict=True)
        ]
        return Step(turns, shelf, self._mesh.device)

    def _every_ready(self, batch: Batch) -> list[Prepared]:
        """By turn."""
        first = self._views[0]
        parts = map_tensors(functools.partial(self._tile, first.net), batch.inputs)
        (ready,) = first.net.prepare(batch.call, [parts], batch.share)
        _check(ready.program.tape)
        every = [ready]
        for view in self._views[1:]:
            parts = map_tensors(functools.partial(self._tile, view.net), batch.inputs)
            every.append(view.net.prepared_as(ready, parts))
        return every

    def _views_within(
        self, budget: TurnBudget, batch: Batch, beside: Sequence[Tensor]
    ) -> list[View]:
        """The fewest turns that fit for such a batch. Collective where it is the first of its kind."""
        flat, tiles = leaves(batch.inputs), self._mesh.plan.tiles
        parts = [
            (leaf.dtype, part.shape if (part := part_of(leaf)) else leaf.shape) for leaf in flat
        ]
        key = (batch.call, torch.is_grad_enabled(), self._net.training, batch.share.total, *parts)
        if key not in self._within:
            turns, held = tiles.turns_by_axis(), [*flat, *beside]
            sizes = (leaf.shape[2:] for leaf in flat if leaf.dim() > 3)
            size = max(sizes, key=math.prod, default=())

            def load(costs: Costs) -> float:
                self._views = self._views_by(turns, costs)
                every = [one.program for one in self._every_ready(batch)]
                found = budget.load(every, held, spills=costs is self._scarce)
                loads = torch.tensor([found], device=self._mesh.device)
                return float(max(comm.all_gather(loads, self._group, Tag.CONTROL)))

            while load(self._plenty) > 1:
                taken = load(self._scarce)
                more = more_turns(turns, size, taken) if tiles.turns == "auto" else None
                if more is None:
                    break
                turns = more
            self._within[key] = self._views
        return self._within[key]

    def _under_way(
        self,
        view: View,
        ready: Prepared,
        whole: frozenset[int],
        state: Mapping[str, Tensor],
        shelf: Shelf,
    ) -> TurnUnderWay:
        segments, updates = segments_of(ready.program), view is self._views[0]
        return TurnUnderWay(view.turn, view.net, ready, segments, state, shelf, updates, whole)

    def _shelf(
        self, programs: Sequence[Program], batch: Sequence[Tensor], state: Mapping[str, Tensor]
    ) -> tuple[Shelf, list[frozenset[int]]]:
        """What is kept between visits, under a budget as much as it leaves; see `TurnBudget.shelf`."""
        if self._budget is None:
            return Shelf(), [frozenset()] * len(programs)
        return self._budget.shelf(programs, batch, (*batch, *state.values()))

    def _noted(self, leaf: Tensor, share: Share) -> Tensor:
        """A leaf that says which part it is of what, which it may leave out where it is whole images."""
        if part_of(leaf) is not None or self.tiles.grid.tiles > 1 or not leaf.dim():
            return leaf
        origin = (share.origin, *(0,) * (leaf.dim() - 1))
        return attach(leaf.view_as(leaf), Part((share.total, *leaf.shape[1:]), origin))

    def _tile(self, view: RecordedNet, leaf: Tensor) -> Tensor:
        """A turn's tile of what this process has."""
        part = part_of(leaf)
        if part is None:
            return leaf
        whole = tuple(leaf.shape[1:]) == part.shape[1:]
        spread = view.spread_of((leaf.shape[0], *part.shape[1:]), channels=whole)
        if spread.is_whole:
            return leaf
        _, *box = spread.owned(view.grid, view.here.rank)
        where = [slice(a - o, b - o) for (a, b), o in zip(box, part.origin[1:], strict=True)]
        piece = leaf[(slice(None), *where)]
        return attach(piece, Part(part.shape, (part.origin[0], *(a for a, _ in box))))

    def _tile_of_tile(self, view: RecordedNet, leaf: Tensor) -> Tensor:
        """The same of what is this process's tile; what is whole stays so."""
        part = part_of(leaf)
        return leaf if part is None or part.shape[1:] == leaf.shape[1:] else self._tile(view, leaf)

    def _together(self, outputs: Sequence[Outputs], ready: Prepared) -> Outputs:
        """What all turns have, as one: this process's part of what is tiled, all else as the first has it."""
        flat = [flatten(one.parts)[0] for one in outputs]
        tree = flatten(outputs[0].parts)[1]
        spreads = flatten(outputs[0].spreads, lambda leaf: isinstance(leaf, Spread))[0]
        joined = [
            self._joined([every[number] for every in flat], spread)
            if isinstance(spread, Spread)
            else flat[0][number]
            for number, spread in enumerate(spreads)
        ]
        lie = [self._lies(one) if isinstance(one, Spread) else one for one in spreads]
        return Outputs(unflatten(joined, tree), unflatten(lie, tree), ready)

    def _lies(self, spread: Spread) -> Spread:
        """How the turns of all processes together have what is spread so, by process."""
        grid, whole = self._views[0].net.grid, self.tiles.grid
        for dim in spread.cut_dims:
            cut = spread.cuts[dim]
            assert cut is not None
            assert len(cut.axes) == 1, "who settled it has what is in several pieces whole"
            name = grid.axes[cut.axes[0]]
            turns = grid.sizes[cut.axes[0]] // getattr(self._mesh.layout, name)
            at = None
            if name in whole.axes:
                at = Division.at((whole.axes.index(name),), cut.bounds[::turns])
            spread = spread.with_cut(dim, at)
        return spread

    def _joined(self, parts: Sequence[Tensor], spread: Spread) -> Tensor:
        """The tiles of this process's turns, put together."""
        if spread.is_whole:
            return parts[0]
        views = [view.net for view in self._views]
        boxes = [spread.owned(view.grid, view.here.rank) for view in views]
        first = [min(box[dim][0] for box in boxes) for dim in range(len(spread.shape))]
        last = [max(box[dim][1] for box in boxes) for dim in range(len(spread.shape))]
        made = parts[0].new_empty([b - a for a, b in zip(first, last, strict=True)])
        for box, part in zip(boxes, parts, strict=True):
            made[tuple(slice(a - o, b - o) for (a, b), o in zip(box, first, strict=True))] = part
        return made


def _state_of(loss: object) -> dict[str, Any]:
    """What a loss that is a module may change as it is called, as far as it can be compared."""
    found: dict[str, Any] = {}
    for path, module in loss.named_modules() if isinstance(loss, nn.Module) else ():
        start = f"{path}." if path else ""
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        found |= {start + name: value for name, value in plain.items()}
        buffers = module.named_buffers(recurse=False)
        found |= {start + name: (id(b), version_of(b)) for name, b in buffers}
    return found


def _check_loss(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise UsageError(
                f"the loss changes its {name} as it is called, and is called for every turn where one "
                "process calls it once: let the script change it, between steps, or leave tiles.turns empty"
            )


def _check(tape: Tape) -> None:
    """Refuse what turns cannot do yet what tile ranks can."""
    remedy = "leave tiles.turns empty, and use tile axes"
    if tape.effects.written or not all(one.plain for one in tape.effects.sets):
        raise UsageError(
            "the forward leaves tensors behind in attributes or buffers, which images that are computed "
            f"by turns would leave in pieces: {remedy}"
        )
    if tape.carried:
        raise UsageError(
            "the forward reads what an earlier one has left in attributes, which images that are computed by "
            f"turns do not carry on: {remedy}"
        )
    for node in tape.nodes:
        read = [one for one in node.operands if isinstance(one, StateRef)]
        norms = uses_batch(node) or "instance_norm" in node.name
        if not norms and any(one.name in tape.statistics for one in read):
            raise UsageError(
                f"{node.where} reads running statistics that the same forward updates, which turns do at "
                f"another time: {remedy}"
            )
        if node.name == "hooked":
            raise UsageError(f"{node.where} has hooks, which see the whole gradient: {remedy}")
        if is_users(node.function) and node.grad and not is_pointwise(node.function):
            raise UsageError(
                f"{node.where} has a backward of its own, and takes whole images: mark it with "
                f"fivefold.pointwise if it looks at one element at a time, or {remedy}"
            )
