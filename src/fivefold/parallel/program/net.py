"""A net that computes in parts: plans by shape and state, and runs them.

inputs (this rank's parts) ── a program that holds for them and for the net as it is ── execute ── outputs
                              found, or recorded and planned; all ranks have the same
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh import Mesh, Part, attach, owned, part_of
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.graph.effects import apply
from fivefold.parallel.graph.numbers import known
from fivefold.parallel.graph.refs import Constant, Ref, StateRef, Value, map_refs
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.intercept import Share, warn_layout
from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.program.costs import Costs, Options, measured
from fivefold.parallel.program.exchange import Exchange, Lines, Want, exchange
from fivefold.parallel.program.prepared import GridSamples, Outputs, Prepared
from fivefold.parallel.program.program import Program, planned
from fivefold.parallel.program.programs import Programs
from fivefold.parallel.program.rule import Here, Moment, Piece, as_held, everything
from fivefold.parallel.program.run import execute
from fivefold.parallel.program.spread import Division, Grid, Spread
from fivefold.parallel.randomness import key_of
from fivefold.parallel.sharded import refuse_write
from fivefold.parallel.trained import check_read
from fivefold.parallel.trees import call_with, flatten, leaves, map_tensors, unflatten
from fivefold.plan import AXES

__all__ = ["ALIKE", "RecordedNet", "Seat", "grid_of", "no_budget"]

ALIKE = "give all of them the same, and let the net draw the same random numbers on all"


def grid_of(mesh: Mesh, *, samples: bool = False) -> Grid:
    """The tile axes of a mesh that are larger than one; with `samples`, after its data axis."""
    axes = ("data",) if samples and mesh.layout.data > 1 else ()
    axes += tuple(axis for axis in TILE_DIMS if getattr(mesh.layout, axis) > 1)
    return Grid(axes, tuple(int(getattr(mesh.layout, axis)) for axis in axes))


_Groups = Mapping[tuple[tuple[int, ...], bool], dist.ProcessGroup]
"""by axes of the grid, and whether the data axis is joined to them"""


@dataclass(frozen=True)
class Seat:
    """Which rank of which grid computes, if it is not the mesh that says so."""

    grid: Grid
    rank: int
    groups: _Groups
    programs: Programs | None = None
    """of another rank of the same process"""


class RecordedNet:
    """The user's net on the ranks that compute a batch together. Creating it is collective: it makes groups.

    These are the tile ranks of a replica, and those of all replicas unless `apart`: then each replica
    computes its samples as if there were no others, but for batch norm.

    Costs that plans go by are measured if need be, unless they are given.
    """

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        costs: Costs | None = None,
        *,
        apart: bool = False,
        seat: Seat | None = None,
    ) -> None:
        self._mesh = mesh
        if seat is None:
            grid = grid_of(mesh, samples=not apart and mesh.plan.parallel.rows != "apart")
            self.grid, self._groups = grid, _groups(mesh, grid)
        else:
            self.grid, self._groups = seat.grid, seat.groups
        self._image_dims = 1 - min(
            (TILE_DIMS[a] for a in self.grid.axes if a in TILE_DIMS), default=0
        )
        every = tuple(range(len(self.grid.axes)))
        tiles = tuple(axis for axis in every if axis != self.grid.data)
        self.lines = Lines(self._groups[tiles, False], self._groups[every, False])
        """the tile ranks of this replica, and all ranks of the grid, in order"""
        self.here = Here(self.grid, self.lines.across.rank() if seat is None else seat.rank)
        plan = mesh.plan
        self._recompute = plan.memory.recompute
        self.budgeted: Callable[[Program], Budgeted | None] = no_budget
        """what a program does under a budget"""
        self.compiles = False
        """whether nodes that follow each other are compiled as one graph, in training steps"""
        fuse = int(plan.tiles.fuse) if plan.tiles.fuse.isdecimal() else plan.tiles.fuse
        if costs is None:
            # Replicas and stages have to make the same plan.
            everyone = mesh.group(*AXES)
            auto = fuse == "auto" and len(tiles) > 0
            costs = measured(self.lines.within, everyone, mesh.device) if auto else Costs()
        self.costs = costs
        options = Options(fuse, plan.tiles.strict, costs, bordered=seat is None)
        self._agreement = mesh.agreement
        self.programs = (
            Programs(net, self.grid, mesh.device, options, once=mesh.predicts)
            if seat is None or seat.programs is None
            else seat.programs
        )

    # ---- where things lie

    def spread_of(self, shape: tuple[int, ...], *, channels: bool = True) -> Spread:
        """How an image batch of this replica lies by the rule of ownership; what is no image is whole.

        Without `channels`, each image is a map of one number per pixel.

        Raises `UsageError` for an image with fewer pixels than tiles along some axis.
        """
        spread = Spread.whole(shape)
        if len(shape) < channels + self._image_dims:
            return spread
        for index, (axis, parts) in enumerate(zip(self.grid.axes, self.grid.sizes, strict=True)):
            if axis not in TILE_DIMS:
                continue
            dim = len(shape) + TILE_DIMS[axis]
            n = shape[dim]
            if n < parts:
                raise UsageError(
                    f"an input of shape {shape} has {n} pixels along its {axis} (dim {dim}), too few for "
                    f"{axis}={parts}: use {axis}={max(n, 1)} or less"
                )
            bounds = [owned(n, parts, part).start for part in range(parts)]
            spread = spread.with_cut(dim, Division.at((index,), (*bounds, n)))
        return spread

    def joined(self, spread: Spread, samples: GridSamples) -> Spread:
        """How what every replica has of its samples lies among all of them."""
        joined = Spread((samples.rows, *spread.shape[1:]), spread.cuts)
        if self.grid.data is None:
            return joined
        return joined.with_cut(0, Division.at((self.grid.data,), samples.bounds))

    def part(self, leaf: Tensor, rows: range) -> Tensor:
        """This rank's part of a leaf of the whole batch: its samples, its tile."""
        _, *box = self.spread_of(tuple(leaf.shape)).owned(self.grid, self.here.rank)
        piece = leaf[(slice(rows.start, rows.stop), *(slice(*r) for r in box))]
        origin = (rows.start, *(start for start, _ in box))
        return attach(piece, Part(tuple(leaf.shape), origin))

    def lies(self, leaf: Tensor) -> tuple[Tensor, Spread]:
        """A leaf of this replica's batch, and how it lies: in tiles, if it is a tile or can be cut into one.

        Raises `UsageError` for a tensor that does not say which part it is of what.
        """
        part = part_of(leaf)
        if part is None:
            if len(leaf.shape) < 1 + self._image_dims or self.grid.tiles == 1:
                return leaf, Spread.whole(leaf.shape)
            raise UsageError(
                f"an input of shape {tuple(leaf.shape)} does not say which tile of which image it is: take "
                "batches from fivefold.loader, or cut them with model.shard(x, y)"
            )
        # What was cut already is an image, even with a dim less: a map of classes, say.
        whole = tuple(leaf.shape[1:]) == part.shape[1:]
        spread = self.spread_of((leaf.shape[0], *part.shape[1:]), channels=whole)
        if tuple(leaf.shape) == spread.local_shape(self.grid, self.here.rank):
            return leaf, spread
        if not whole:
            raise UsageError(
                f"an input of shape {tuple(leaf.shape)}, part of {part.shape}, is neither whole images nor "
                f"this rank's tile of {spread.local_shape(self.grid, self.here.rank)}: give what a model has "
                "returned to another one by model.whole(outputs)"
            )
        return leaf[tuple(slice(*r) for r in spread.owned(self.grid, self.here.rank))], spread

    def samples(self, share: Share, micro: tuple[int, int] = (0, 1)) -> GridSamples:
        """The samples that are computed together: micro-batch number `micro[0]` of `micro[1]`."""
        number, count = micro
        if self.grid.data is None:
            mine = owned(share.rows, count, number)
            return GridSamples((0, len(mine)), (Piece(0, len(mine), share.origin + mine.start),))
        bounds, pieces = [0], list[Piece]()
        for first, last in itertools.pairwise(share.bounds):
            mine = owned(last - first, count, number)
            stop = bounds[-1] + len(mine)
            pieces.append(Piece(bounds[-1], stop, first + mine.start))
            bounds.append(stop)
        return GridSamples(tuple(bounds), tuple(pieces), self.grid.coordinates(self.here.rank)[0])

    def _here(self, samples: GridSamples, fewest: int) -> Here:
        data = self.grid.data
        cut = None if data is None else Division.at((data,), samples.bounds)
        return replace(self.here, rows=samples.rows, fewest=fewest, cut=cut)

    def _stand_in(self, samples: GridSamples) -> GridSamples:
        """One sample that counts for nothing, where there is none."""
        return replace(samples, bounds=(0, *(1,) * self.grid.replicas))

    # ---- running

    def run(self, call: Callable[..., Any], inputs: Any, share: Share) -> Outputs:
        """Compute this rank's part of what `call(net, inputs)` returns. Collective over the mesh."""
        (ready,) = self.prepare(call, [inputs], share)
        made = execute(ready.program, ready.inputs, self.state(ready), ready.moment)
        self.leave(ready, made)
        return self.finish(ready, made)

    def prepare(
        self,
        call: Callable[..., Any],
        batches: Sequence[Any],
        share: Share,
        *,
        between: Callable[[Prepared], None] | None = None,
    ) -> list[Prepared]:
        """Get ready to run on the micro-batches of a batch, of which this rank has `batches`. Collective.

        `between` is called after each. Raises `UsageError` on all ranks for a net that cannot be recorded on
        one of them, or is not the same on all.
        """
        found: list[Prepared] = []
        problem: FivefoldError | None = None
        self.programs.step = share.step
        try:
            for number, inputs in enumerate(batches):
                found.append(self._prepared(call, inputs, share, (number, len(batches))))
                if between is not None:
                    between(found[-1])
        except FivefoldError as raised:
            problem = raised
        self._agree(found, share, problem)
        return found

    def _agree(
        self, found: Sequence[Prepared], share: Share, problem: FivefoldError | None
    ) -> None:
        marks = [ready.program.marked() for ready in found]
        said = (share.total, share.step, *(ready.samples.bounds for ready in found))
        token = (
            hash((said, *(mark.digest for mark in marks))) & (2**62 - 1) if problem is None else -1
        )
        if self._agreement.same(token) and problem is None:
            return
        self._agreement.check_problem(problem)
        about = [(f"{said}", "the batch: number of samples, number of the step, shares")]
        self._agreement.check(
            [*about, *(line for mark in marks for line in mark.lines)],
            "what they do",
            ALIKE,
            most=1,
        )

    def _prepared(
        self, call: Callable[..., Any], inputs: Any, share: Share, micro: tuple[int, int]
    ) -> Prepared:
        samples = self.samples(share, micro)
        located = [self.lies(leaf) for leaf in leaves(inputs)]
        if not samples.rows:
            located = [(_one_row(leaf), spread) for leaf, spread in located]
        known = samples if samples.rows else self._stand_in(samples)
        spreads = [self.joined(spread, known) for _, spread in located]
        fewest = samples.fewest
        if self.grid.data is None:
            fewest = share.total // self._mesh.layout.data // micro[1]
        here = self._here(known, fewest)
        program = self.programs.program(call, inputs, spreads, here)
        if program.drawn is not None and not share.draws:
            warn_layout(program.drawn.where)
        if self._mesh.plan.memory.shard != "none" and self._mesh.layout.data > 1:
            check_divided(program.tape)
        budget = self.budgeted(program) if torch.is_grad_enabled() else None
        again = self._recompute not in {0, "none"} and torch.is_grad_enabled()
        if again or (budget is not None and budget.choice.again):
            _check_recomputed(program.tape)
        _check_hooked(program.tape, share.hooked)
        check_read(program.tape)
        carried = [found.now() for found in program.tape.carried]
        moment = Moment(
            groups=self._group,
            lines=self.lines,
            rows=samples.rows,
            total=share.total,
            pieces=samples.pieces,
            joint=share.group is not None,
            key=lambda scope, number: key_of(share.seed, share.step, scope, number),
            recompute=self._recompute,
            budget=budget,
            compiles=self.compiles,
            here=here,
        )
        given = (*(leaf for leaf, _ in located), *carried)
        return Prepared(program, given, moment, share, samples)

    def _group(self, axes: tuple[int, ...], joint: bool) -> dist.ProcessGroup:
        return self._groups[axes, joint]

    def prepared_as(self, ready: Prepared, inputs: Any) -> Prepared:
        """What another rank of this process has prepared, for this one and its part of the batch."""
        parts = [self.lies(leaf)[0] for leaf in leaves(inputs)]
        if not ready.samples.rows:
            parts = [_one_row(part) for part in parts]
        program, before = ready.program.of_rank(self.here.rank), ready.moment
        here = None if before.here is None else replace(before.here, rank=self.here.rank)
        moment = replace(before, groups=self._group, lines=self.lines, here=here)
        return replace(ready, program=program, inputs=(*parts,), moment=moment)

    def state(self, ready: Prepared) -> Mapping[str, Tensor]:
        """The net's tensors that a program names, as they are now; what is trained, itself."""
        tape = ready.program.tape
        changed = _changed(tape)
        found: dict[str, Tensor] = {}
        for name in tape.named:
            tensor = cast(Tensor, tape.places[name].now())
            if name in changed and not _trained(tensor):
                now = tensor.detach().clone()
                tensor = nn.Parameter(now, False) if isinstance(tensor, nn.Parameter) else now
            found[name] = tensor
        return found

    def finish(self, ready: Prepared, made: Mapping[int, Tensor]) -> Outputs:
        """What the net returns, given its values. Collective over the grid."""
        program = ready.program

        def part(ref: Ref) -> Tensor:
            assert isinstance(ref, Value)
            spread = program.spreads[ref.index]
            # A margin is of no use to anybody outside.
            own = Exchange.of(spread, as_held(spread.tight()), self.grid, self.here.rank)
            return exchange(made[ref.index], own, self.lines)

        def lies(ref: Ref) -> Spread:
            assert isinstance(ref, Value)
            return program.spreads[ref.index].tight()

        outputs = program.tape.outputs
        return Outputs(map_refs(part, outputs), map_refs(lies, outputs), ready)

    def own(self, outputs: Outputs, *, whole: bool = False) -> Any:
        """What the user of a net gets of it: all samples of this replica, of images this rank's tile.

        With `whole`, images too, on the first tile rank; nothing on the others. Collective over the grid.
        """
        settled = self.settled(outputs, whole=whole)
        if whole:
            return settled.parts
        flat, tree = flatten(settled.parts)
        spreads = flatten(settled.spreads, lambda leaf: isinstance(leaf, Spread))[0]
        own = [
            self._noted(leaf, spread, outputs.ready) if isinstance(spread, Spread) else leaf
            for leaf, spread in zip(flat, spreads, strict=True)
        ]
        return unflatten(own, tree)

    def settled(self, outputs: Outputs, *, whole: bool = False, pieces: bool = True) -> Outputs:
        """The same with all samples of this replica on each of its ranks, images in tiles.

        With `whole`, images whole on the first tile rank, and nothing on the others. Without `pieces`, dims
        whole that are divided along several axes of the grid. Collective over the grid.
        """
        flat, tree = flatten(outputs.parts)
        spreads = flatten(outputs.spreads, lambda leaf: isinstance(leaf, Spread))[0]
        found = [
            self._settled(leaf, spread, outputs.samples, whole, pieces)
            if isinstance(spread, Spread)
            else (leaf, spread)
            for leaf, spread in zip(flat, spreads, strict=True)
        ]
        parts, lie = [part for part, _ in found], [spread for _, spread in found]
        return replace(outputs, parts=unflatten(parts, tree), spreads=unflatten(lie, tree))

    def _settled(
        self, leaf: Tensor, spread: Spread, samples: GridSamples, whole: bool, pieces: bool
    ) -> tuple[Tensor, Spread]:
        grid = self.grid
        rows = spread.shape[:1] == (max(samples.rows, 1),)
        wants, lies = list(as_held(spread)), spread
        if whole:
            tiles = tuple(axis for axis in range(len(grid.axes)) if axis != grid.data)
            others = (((0, 0),),) * (grid.tiles - 1)
            wants = [Want(tiles, (((0, n),), *others)) for n in spread.shape]
        for dim in () if pieces else spread.cut_dims:
            if len(getattr(spread.cuts[dim], "axes", ())) > 1:
                wants[dim], lies = Want.all_of(spread.shape[dim]), lies.with_cut(dim, None)
        if rows and grid.data is not None:
            wants[0] = samples.want(grid.data)
            lies = lies.with_cut(0, Division.at((grid.data,), samples.bounds))
        elif rows:
            wants[0] = Want.all_of(spread.shape[0])
            lies = lies.with_cut(0, None)
        plan = Exchange.of(spread, wants, grid, self.here.rank)
        return exchange(leaf, plan, self.lines), lies

    def leave(self, ready: Prepared, made: Mapping[int, Tensor], *, stages: bool = False) -> None:
        """Leave behind what a forward leaves: buffers, attributes. Collective over the grid.

        With `stages`, only what comes of the values in `made`: numbers that are no tensor's are left before.
        """
        effects, program = ready.program.tape.effects, ready.program
        if not effects or (stages and not made):
            return

        def whole(ref: Ref) -> Tensor:
            if isinstance(ref, StateRef):
                return program.tape.places[ref.name].now()
            if isinstance(ref, Constant):
                return ref.tensor
            spread = program.spreads[ref.index]
            plan = Exchange.of(spread, everything(spread.shape), self.grid, self.here.rank)
            return exchange(made[ref.index].detach(), plan, self.lines)

        def own(ref: Ref) -> Tensor:
            if not isinstance(ref, Value):
                return whole(ref)
            spread = program.spreads[ref.index]
            tight = Exchange.of(spread, as_held(spread.tight()), self.grid, self.here.rank)
            return self._kept(exchange(made[ref.index], tight, self.lines), spread.tight(), ready)

        sets = [one for one in effects.sets if not stages or one.among(made)]
        with torch.no_grad():
            for target, ref in effects.written:
                if not stages or not isinstance(ref, Value) or ref.index in made:
                    tensor = whole(target)
                    if ready.samples.rows and not tensor.is_meta:
                        tensor.data.copy_(whole(ref))
        apply(sets, own, whole)

    def leave_ahead(self, ready: Prepared) -> None:
        """Leave behind what is no tensor's; for tensors something of their shape, where nothing is yet or
        something of another shape that is not read any more.

        Before the stages of a micro-batch run: each rank has some of them, and all have to record alike.
        """
        tape = ready.program.tape

        def blank(ref: Ref) -> Tensor:
            if not isinstance(ref, Value):
                return tape.places[ref.name].now() if isinstance(ref, StateRef) else ref.tensor
            own = known(ref, tape.nodes, lambda name: tape.places[name].now(), tape.statistics)
            if own is not None:  # all ranks can have it
                return own()
            shape, spread = tape.shapes[ref.index], ready.program.spreads[ref.index].tight()
            made = torch.empty(shape, dtype=tape.dtypes[ref.index], device="meta")
            self.programs.note_left(made, spread)
            return made

        read = {found.path for name, found in tape.places.items() if name in tape.named}
        read |= {found.path for found in tape.carried}
        due = [
            one for one in tape.effects.sets
            if one.plain or not one.there or not (one.fits(tape.shapes) or one.path in read)
        ]  # fmt: skip
        apply(due, blank, blank)

    def _kept(self, leaf: Tensor, spread: Spread, ready: Prepared) -> Tensor:
        """Something that is left in an attribute, of which the next forward is told how it lies."""
        leaf = self._noted(leaf, spread, ready)
        self.programs.note_left(leaf, spread)
        return leaf

    def note_left(self, program: Program) -> None:
        """Note what a forward has left in attributes that ran as it is, on this replica's samples."""
        for one in program.tape.effects.sets:
            refs = [ref for ref in one.refs() if isinstance(ref, Value)]
            now = one.now() if refs and not one.registered else []
            for ref, leaf in zip(refs, now, strict=False):
                self.programs.note_left(leaf, program.spreads[ref.index].tight())

    def plan_for(
        self, example: Any, share: Callable[[int], range], call: Callable[..., Any] = call_with
    ) -> Program:
        """The plan for inputs with the shapes of `example`, a global batch; `share(n)` is this rank's."""
        first = leaves(example)[0].shape[0]
        replicas = range(self._mesh.layout.data)
        bounds = [owned(first, len(replicas), replica).start for replica in replicas]
        mine = share(first)
        whole = Share(len(mine), mine.start, first, 0, 0, None, bounds=(*bounds, first))
        samples = self.samples(whole)
        samples = samples if samples.rows else self._stand_in(samples)

        def own(leaf: Tensor) -> Tensor:
            rows = max(len(share(leaf.shape[0])), 1)
            return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

        inputs = map_tensors(own, example)
        spreads = [
            self.joined(self.spread_of(tuple(leaf.shape)), samples) for leaf in leaves(inputs)
        ]
        fewest = first // len(replicas)
        with torch.enable_grad():
            return self.programs.program(call, inputs, spreads, self._here(samples, fewest))

    # ---- programs

    def program_for(self, call: Callable[..., Any], inputs: Any, share: Share) -> Program:
        """The program for this rank's part of a batch. Raises `UsageError` for what cannot be recorded."""
        samples = self.samples(share)
        spreads = [self.joined(self.lies(leaf)[1], samples) for leaf in leaves(inputs)]
        return self.programs.program(call, inputs, spreads, self._here(samples, samples.fewest))

    def planned_with(self, program: Program, share: Share, alike: frozenset[int]) -> Program:
        """The same net planned anew, with values that do not lie by samples though they have as many rows."""
        samples, tape = self.samples(share), program.tape
        here = replace(self._here(samples, samples.fewest), alike=alike)
        return planned(tape, [program.spreads[index] for index in tape.inputs], here)

    def recorded(self, call: Callable[..., Any], inputs: Any, rank: int | None = None) -> Tape:
        """The net as a list of calls, for inputs of these shapes: of the whole batch, or of one rank."""
        spreads = [Spread.whole(leaf.shape) for leaf in leaves(inputs)]
        return self.programs.recorded(call, inputs, spreads, rank)

    def _noted(self, leaf: Tensor, spread: Spread, ready: Prepared) -> Tensor:
        """A tensor of which it can be told which part of the whole batch's it is."""
        samples = ready.samples
        if not samples.rows:
            leaf = leaf[:0] if leaf.dim() else leaf
        if not leaf.dim() or spread.shape[0] != max(samples.rows, 1):
            return leaf
        box = spread.held(self.grid, self.here.rank)
        origin = (_place(samples, box[0][0]), *(start for start, _ in box[1:]))
        return attach(leaf, Part((ready.share.total, *spread.shape[1:]), origin))


def _place(samples: GridSamples, row: int) -> int:
    """The number in the global batch of a sample."""
    for piece in samples.pieces:
        if piece.start <= row < piece.stop:
            return piece.origin + row - piece.start
    return samples.pieces[-1].origin


def _groups(mesh: Mesh, grid: Grid) -> _Groups:
    """A group for every choice of axes of the grid, with the data axis and without."""
    found: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    alone = next((axis for axis in AXES if getattr(mesh.layout, axis) == 1), None)
    indices = range(len(grid.axes))
    for size in range(len(grid.axes) + 1):
        for axes in itertools.combinations(indices, size):
            names = [grid.axes[index] for index in axes]
            found[axes, True] = mesh.group("data", *names)
            if not names:  # this rank alone: the group of an axis of size one, if there is one
                found[axes, False] = mesh.own_group() if alone is None else mesh.group(alone)
            else:
                found[axes, False] = mesh.group(*names)
    return found


def _changed(tape: Tape) -> set[str]:
    """Names of the net's tensors that it changes in the end, statistics of norms apart."""
    return {r.name for r, _ in tape.effects.written if isinstance(r, StateRef)} - tape.statistics


def check_divided(tape: Tape) -> None:
    """Refuse a net that changes parameters which replicas divide: what it writes is let go with the step."""
    for name in sorted(_changed(tape)):
        if isinstance(tape.places[name].now(), nn.Parameter):
            refuse_write(name)


def _trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _check_recomputed(tape: Tape) -> None:
    """Refuse to compute again what reads a parameter that is another one by then."""
    for name in sorted(_changed(tape)):
        if _trained(cast(Tensor, tape.places[name].now())):
            raise UsageError(
                f"the forward changes {name}, which is trained, so its activations cannot be computed again "
                'from what it was: set memory.recompute = "none" and no memory.budget'
            )


def _check_hooked(tape: Tape, hooked: frozenset[str]) -> None:
    """Refuse hooks that one process calls several times in a step, each time with a part of the gradient."""
    for name in sorted(hooked & tape.in_parts):
        raise UsageError(
            f"{name} has hooks and is used in several places, of which some are checkpointed with "
            "use_reentrant=True: one process calls the hooks for each of them, with a part of the gradient. "
            "Give the checkpoints use_reentrant=False"
        )


def no_budget(_: Program) -> None:
    """Everything is kept."""


def _one_row(leaf: Tensor) -> Tensor:
    return torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
