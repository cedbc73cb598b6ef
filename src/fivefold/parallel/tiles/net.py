"""A net that computes in tiles: plans by shape, and runs them.

inputs (this rank's tiles) ── plan of their global shape, made on first sight ── execute ── outputs (tiles)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, attach, owned, part_of
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.intercept import Share
from fivefold.parallel.randomness import key_of
from fivefold.parallel.tiles.costs import Costs, Options, measured
from fivefold.parallel.tiles.exchange import Exchange, exchange
from fivefold.parallel.tiles.program import Program, cheapest_thinnest, planned
from fivefold.parallel.tiles.record import record
from fivefold.parallel.tiles.rule import Here, Moment, as_held
from fivefold.parallel.tiles.run import execute
from fivefold.parallel.tiles.spread import Cut, Grid, Spread
from fivefold.parallel.tiles.tape import Tape, Value
from fivefold.parallel.trees import call_with, leaves, map_tensors
from fivefold.plan import AXES

__all__ = ["Outputs", "Prepared", "TiledNet", "grid_of"]


def grid_of(mesh: Mesh) -> Grid:
    """The tile axes of a mesh that are larger than one."""
    axes = tuple(axis for axis in TILE_DIMS if getattr(mesh.layout, axis) > 1)
    return Grid(axes, tuple(int(getattr(mesh.layout, axis)) for axis in axes))


@dataclass(frozen=True)
class Prepared:
    """Everything to run a net on one batch."""

    program: Program
    inputs: tuple[Tensor, ...]
    """this rank's parts, as the plan has them"""
    moment: Moment
    share: Share


@dataclass(frozen=True)
class Outputs:
    """What a net returns: this rank's parts, and how they lie. Both trees have the same structure."""

    parts: Any
    spreads: Any


class TiledNet:
    """The user's net on the tile ranks of one replica. Creating it is collective: it makes groups.

    Costs that plans go by are measured if need be, unless they are given.
    """

    def __init__(self, net: nn.Module, mesh: Mesh, costs: Costs | None = None) -> None:
        self._net, self._device = net, mesh.device
        self.grid = grid_of(mesh)
        self._image_dims = 1 - min((TILE_DIMS[axis] for axis in self.grid.axes), default=0)
        self._groups = _groups(mesh, self.grid)
        self.group = self._groups[tuple(range(len(self.grid.axes))), False]
        """the tile ranks of this replica, in order"""
        self.here = Here(self.grid, self.group.rank(), mesh.layout.data)
        tiles, self._recompute = mesh.plan.tiles, mesh.plan.memory.recompute
        fuse = int(tiles.fuse) if tiles.fuse.isdecimal() else tiles.fuse
        if costs is None:
            # Replicas and stages have to make the same plan.
            everyone = mesh.group(*AXES)
            costs = measured(self.group, everyone, mesh.device) if fuse == "auto" else Costs()
        self.costs = costs
        self._options = Options(fuse, tiles.strict, costs)
        self._programs: dict[Any, Program] = {}
        _check_hooks(net)

    # ---- where things lie

    def spread_of(self, shape: tuple[int, ...], *, channels: bool = True) -> Spread:
        """How an image batch of this global shape lies by the rule of ownership; what is no image is whole.

        Without `channels`, each image is a map of one number per pixel.

        Raises `UsageError` for an image with fewer pixels than tiles along some axis.
        """
        spread = Spread.whole(shape)
        if len(shape) < channels + self._image_dims:
            return spread
        for index, (axis, parts) in enumerate(zip(self.grid.axes, self.grid.sizes, strict=True)):
            dim = len(shape) + TILE_DIMS[axis]
            n = shape[dim]
            if n < parts:
                raise UsageError(
                    f"an input of shape {shape} has {n} pixels along its {axis} (dim {dim}), too few for "
                    f"{axis}={parts}: use {axis}={max(n, 1)} or less"
                )
            bounds = [owned(n, parts, part).start for part in range(parts)]
            spread = spread.with_cut(dim, Cut.at((index,), (*bounds, n)))
        return spread

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
            if len(leaf.shape) < 1 + self._image_dims or not self.grid.axes:
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
                f"this rank's tile of {spread.local_shape(self.grid, self.here.rank)}"
            )
        return leaf[tuple(slice(*r) for r in spread.owned(self.grid, self.here.rank))], spread

    # ---- running

    def run(self, call: Callable[..., Any], inputs: Any, share: Share) -> Outputs:
        """Compute this rank's part of what `call(net, inputs)` returns. Collective over the tile ranks."""
        ready = self.prepare(call, inputs, share)
        made = execute(ready.program, ready.inputs, self.state(), ready.moment, self.group)
        return self.finish(ready, made)

    def state(self) -> dict[str, Tensor]:
        """The net's parameters and buffers by name."""
        return {**dict(self._net.named_parameters()), **dict(self._net.named_buffers())}

    def prepare(
        self, call: Callable[..., Any], inputs: Any, share: Share, fewest: int | None = None
    ) -> Prepared:
        """Get ready to run on one batch, of which the smallest replica has `fewest` samples."""
        located = [self.lies(leaf) for leaf in leaves(inputs)]
        if not share.rows:
            located = [(_one_row(leaf), _with_rows(spread, 1)) for leaf, spread in located]
        if fewest is None:
            fewest = share.total // self.here.data
        program = self._program(call, inputs, [spread for _, spread in located], fewest)
        moment = Moment(
            groups=lambda axes, joint: self._groups[axes, joint],
            rows=share.rows,
            origin=share.origin,
            total=share.total,
            joint=share.group is not None,
            key=lambda scope, number: key_of(share.seed, share.step, scope, number),
            recompute=self._recompute,
            here=self.here,
        )
        return Prepared(program, tuple(leaf for leaf, _ in located), moment, share)

    def finish(self, ready: Prepared, made: Mapping[int, Tensor]) -> Outputs:
        """What the net returns, given its values. Collective over the tile ranks."""
        program = ready.program

        def part(ref: Value) -> Tensor:
            spread = program.spreads[ref.index]
            # A margin is of no use to anybody outside.
            own = Exchange.of(spread, as_held(spread.tight()), self.grid, self.here.rank)
            leaf = exchange(made[ref.index], own, self.group)
            return self._noted(leaf, spread.tight(), ready.share)

        return Outputs(
            tree_map_only(Value, part, program.tape.outputs),
            tree_map_only(
                Value, lambda ref: program.spreads[ref.index].tight(), program.tape.outputs
            ),
        )

    def plan_for(self, example: Any, share: Callable[[int], range]) -> Program:
        """The plan for inputs with the shapes of `example`, a global batch; `share(n)` is this rank's."""

        def mine(leaf: Tensor) -> Tensor:
            rows = max(len(share(leaf.shape[0])), 1)
            return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

        inputs = map_tensors(mine, example)
        spreads = [self.spread_of(tuple(leaf.shape)) for leaf in leaves(inputs)]
        return self._program(
            call_with, inputs, spreads, leaves(example)[0].shape[0] // self.here.data
        )

    def _program(
        self, call: Callable[..., Any], inputs: Any, spreads: list[Spread], fewest: int
    ) -> Program:
        key = (
            tuple(spread.shape for spread in spreads),
            tuple(leaf.dtype for leaf in leaves(inputs)),
            tuple(module.training for module in self._net.modules()),
            fewest >= self.grid.size,
            torch.is_autocast_enabled(self._device.type),
        )
        if key not in self._programs:
            here = replace(self.here, fewest=fewest)
            tape = self._recorded(call, inputs, spreads)
            # Judged by as many samples as the smallest replica has: larger ones must not choose otherwise.
            even = [
                _with_rows(s, fewest) if s.shape[:1] == spreads[0].shape[:1] else s for s in spreads
            ]
            alike = even == spreads or fewest < self.grid.size
            judged = tape if alike else self._recorded(call, inputs, even)
            thinnest = cheapest_thinnest(judged, even, here, self._options)
            self._programs[key] = planned(tape, spreads, here, self._options, thinnest)
        return self._programs[key]

    def recorded(self, call: Callable[..., Any], inputs: Any) -> Tape:
        """The net as a list of calls, for inputs of these global shapes."""
        return self._recorded(call, inputs, [Spread.whole(leaf.shape) for leaf in leaves(inputs)])

    def _recorded(self, call: Callable[..., Any], inputs: Any, spreads: list[Spread]) -> Tape:
        shapes = [torch.Size(spread.shape) for spread in spreads]
        return record(self._net, call, inputs, shapes, self._device)

    def _noted(self, leaf: Tensor, spread: Spread, share: Share) -> Tensor:
        """An output of which it can be told which part of the whole batch's it is."""
        if not share.rows:
            leaf = leaf[:0] if leaf.dim() else leaf
        if not leaf.dim() or spread.shape[0] != max(share.rows, 1):
            return leaf
        box = spread.held(self.grid, self.here.rank)
        origin = (share.origin + box[0][0], *(start for start, _ in box[1:]))
        return attach(leaf, Part((share.total, *spread.shape[1:]), origin))


def _groups(mesh: Mesh, grid: Grid) -> Mapping[tuple[tuple[int, ...], bool], dist.ProcessGroup]:
    """A group for every choice of tile axes, with the data axis and without."""
    found: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    alone = next((axis for axis in AXES if getattr(mesh.layout, axis) == 1), None)
    indices = range(len(grid.axes))
    for size in range(len(grid.axes) + 1):
        for axes in itertools.combinations(indices, size):
            names = [grid.axes[index] for index in axes]
            found[axes, True] = mesh.group("data", *names)
            if (
                not names
            ):  # a group of this rank alone: that of an axis of size one, if there is one
                found[axes, False] = mesh.own_group() if alone is None else mesh.group(alone)
            else:
                found[axes, False] = mesh.group(*names)
    return found


def _one_row(leaf: Tensor) -> Tensor:
    return torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)


def _with_rows(spread: Spread, rows: int) -> Spread:
    return Spread((rows, *spread.shape[1:]), spread.cuts)


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_KNOWN_HOOKS = ("torch.nn.utils.",)


def _check_hooks(net: nn.Module) -> None:
    """Refuse hooks that would run once, when the net is recorded, and never again."""
    for name, module in net.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if not (type(hook).__module__ + ".").startswith(_KNOWN_HOOKS):
                    where = f"the module {name!r}" if name else "the net"
                    raise UsageError(
                        f"{where} has a hook ({kind.strip('_').replace('_', ' ')}), which a recorded "
                        "net would drop: remove it before parallelize, or use the data axis only"
                    )
