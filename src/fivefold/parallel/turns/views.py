"""A net as the turns of a process see it.

Every turn has the program that a tile rank would have, of the same recording; in place of groups of ranks
there are those of turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fivefold.mesh import Mesh
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.asked import Processes, Turn, TurnGroup
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.loss import TileLoss
from fivefold.parallel.program.net import RecordedNet, Seat
from fivefold.parallel.program.spread import Grid
from fivefold.plan import AXES

__all__ = ["View", "more_turns", "views_of"]

_SMALLEST = 16
"""pixels of an edge of a tile, of which smaller ones are not looked at: they would be margin mostly"""


@dataclass(frozen=True)
class View:
    """Of one turn."""

    turn: Turn
    net: RecordedNet
    loss: TileLoss | None


def views_of(
    net: nn.Module,
    mesh: Mesh,
    turns: Mapping[str, int],
    costs: Costs,
    *,
    joint: bool,
    loss: SharedLoss | None,
) -> list[View]:
    """Those of this process, in order, with `turns` by tile axis. Collective: it makes groups.

    With `joint`, replicas compute their samples together.
    """
    size = {axis: getattr(mesh.layout, axis) * turns.get(axis, 1) for axis in TILE_DIMS}
    axes = [axis for axis in TILE_DIMS if size[axis] > 1]
    sizes = [size[axis] for axis in axes]
    if joint:
        axes, sizes = ["data", *axes], [mesh.layout.data, *sizes]
    grid, found = Grid(tuple(axes), tuple(sizes)), list[View]()
    for place in itertools.product(*(_range(mesh, axis, turns) for axis in axes)):
        rank, turn = _row_major(place, sizes), Turn()
        groups = _groups(mesh, grid, place, turns, turn)
        seat = Seat(grid, rank, groups, found[0].net.programs if found else None)
        view = RecordedNet(net, mesh, costs, seat=seat)
        found.append(View(turn, view, None if loss is None else TileLoss(loss, view)))
    return found


def more_turns(turns: Mapping[str, int], size: Sequence[int], load: float) -> dict[str, int] | None:
    """Into how many to divide an image of `size` pixels instead; None if these do, or no more make sense.

    `load` is what these take of what there is for them; of their edges the longest are halved.
    """
    found, wanted = dict(turns), load * math.prod(turns.values())
    names = [axis for axis in ("height", "width") if -TILE_DIMS[axis] <= len(size)]
    while load > 1 and math.prod(found.values()) < max(wanted / 2, 2 * math.prod(turns.values())):
        edges = {name: size[TILE_DIMS[name]] // found.get(name, 1) for name in names}
        longest = max(edges, key=edges.__getitem__, default=None)
        if longest is None or edges[longest] < 2 * _SMALLEST:
            break
        found[longest] = 2 * found.get(longest, 1)
    return None if found == turns else found


def _range(mesh: Mesh, axis: str, turns: Mapping[str, int]) -> range:
    """Where the turns of this process are along an axis."""
    count, here = turns.get(axis, 1), mesh.coordinate(axis)
    return range(here * count, (here + 1) * count)


def _row_major(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for here, size in zip(place, sizes, strict=True):
        number = number * size + here
    return number


def _groups(
    mesh: Mesh, grid: Grid, place: Sequence[int], turns: Mapping[str, int], turn: Turn
) -> Mapping[tuple[tuple[int, ...], bool], TurnGroup]:
    """For every choice of axes of the grid, with the data axis and without: who asks each other."""
    found: dict[tuple[tuple[int, ...], bool], TurnGroup] = {}
    at = dict(zip(grid.axes, place, strict=True)) | {"data": mesh.coordinate("data")}
    indices = range(len(grid.axes))
    for size in range(len(grid.axes) + 1):
        for axes in itertools.combinations(indices, size):
            for joint in (False, True):
                names = {grid.axes[index] for index in axes} | ({"data"} if joint else set())
                along = [axis for axis in AXES if axis in names]
                sizes = tuple(getattr(mesh.layout, axis) for axis in along)
                each = tuple(turns.get(axis, 1) for axis in along)
                alone = math.prod(sizes) == 1
                processes = Processes(sizes, each, None if alone else mesh.group(*along))
                whole = [s * t for s, t in zip(sizes, each, strict=True)]
                number = _row_major([at[axis] for axis in along], whole)
                line = tuple(at[axis] for axis in grid.axes if axis not in names)
                found[axes, joint] = TurnGroup(turn, number, line, processes)
    return found
