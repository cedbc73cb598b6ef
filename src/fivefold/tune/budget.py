"""What a stage can do to hold less than all that backward needs, and what that costs, estimated.

    steps ──► profile, as runs make it of what they see ──► some hundred choices, simulated as runs do
                                                                │  of those that hold less, the fastest
    again_s   0        0.1      0.4      0.9                    ▼
    bytes     12 GiB   9 GiB    7 GiB    4 GiB

Under `memory.budget` a run searches longer, and proves what it finds. Here choices go in a few fixed ways
from everything kept to everything computed again, so a run does about as well or better. Spilling is left
out: a cluster file knows of no disks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.memory.decide import starts
from fivefold.parallel.memory.profile import Item, NodeBytes, Profile
from fivefold.parallel.memory.simulate import JOINED, Simulator, State
from fivefold.parallel.program.program import Compute
from fivefold.parallel.program.recompute import segment_of
from fivefold.parallel.program.run import returned
from fivefold.tune.subject import Staged

__all__ = ["LEVELS", "Level", "levels", "returned_bytes"]

LEVELS = 24
"""choices that are looked at, of each stage"""
_OFF = 1.1
"""how much more than simulated a step may hold that computes again: the simulation is roughly right"""


@dataclass(frozen=True)
class Level:
    """One choice."""

    again_s: float
    """to compute again, for a micro-batch, without messages"""
    saved: float
    """bytes that a micro-batch keeps for backward"""
    beside: float
    """the most bytes beside it while one is differentiated"""


@functools.lru_cache(4096)
def levels(
    staged: Staged, stage: int, rows: int, alive: int, *, gathers: bool
) -> tuple[Level, ...]:
    """`LEVELS` choices for a stage, the fastest first; each holds at most what the one before does.

    Args:
        staged: the net in stages.
        stage: which of them.
        rows: samples of a micro-batch.
        alive: how many micro-batches keep something at once.
        gathers: whether the gradients of parameters stay as a step makes them; else each is added to what is
            there as soon as it is made.
    """
    every = _simulated(staged, stage, rows, gathers)
    found: list[Level] = []
    least = math.inf
    for level in sorted(every, key=lambda level: level.again_s):
        holds = alive * level.saved + level.beside
        if holds < least:
            found.append(level)
            least = holds
    return tuple(found[n] for n in np.linspace(0, len(found) - 1, LEVELS).round().astype(int))


@functools.lru_cache(4096)
def _simulated(staged: Staged, stage: int, rows: int, gathers: bool) -> list[Level]:
    """All choices; see `levels`."""
    profile, always = _profile(staged, stage, rows, gathers)
    one, two = (
        Simulator(replace(profile, items=tuple(replace(i, copies=n) for i in profile.items)), None)
        for n in (1, 2)
    )
    states = _states(one)
    told = one.run(states)
    again_s = told.seconds - told.seconds[0]
    saved = two.run(states).peak_bytes - told.peak_bytes
    peak = told.peak_bytes * np.where(again_s > 0, _OFF, 1.0)
    scale = rows / staged.work.rows
    columns = again_s, scale * (saved + always), scale * (peak - saved)
    return [Level(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _states(simulator: Simulator) -> list[State]:
    """Ways from everything kept, and from each unit computed again by itself, to all in larger spans.

    On each way spans come one by one: those first that free the most for their time, or in the net's order.
    """
    keep, again, *joined = starts(simulator)
    made = [keep]
    for base, end in [(keep, again), *itertools.product((keep, again), joined)]:
        freed = simulator.held(base)[0] - simulator.held(end)[0]
        costs = simulator.again_s(end) - simulator.again_s(base)
        bounds = [0, *(np.flatnonzero(end.units != JOINED) + 1)]
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        worth = [freed[span].sum() / max(costs[span].sum(), 1e-12) for span in spans]
        for order in (np.argsort(worth)[::-1], range(len(spans))):
            state = base
            for number in order:
                state = state.copy()
                state.units[spans[number]] = end.units[spans[number]]
                made.append(state)
    return made


# ---- What a run sees in a step that keeps everything, told from the list of calls
#
# Values that cross the border of a stage, and what was received of neighbours, are there whatever is chosen:
# they are no items, and are added in the end. The loss is taken for one of as many targets as outputs, whose
# probabilities and two gradients are as large as what the net returns.


def _profile(staged: Staged, stage: int, rows: int, gathers: bool) -> tuple[Profile, float]:
    """Of the samples that the program was made for; and the bytes that are always there."""
    program, held, work = staged.program, staged.work.held, staged.work
    span, inputs = staged.spans[stage], set(program.tape.inputs)
    part = slice(span.start, span.stop)
    border = segment_of(program, returned(program), span)
    crossing = {held.aliases.get(v, v) for v in (*border.takes, *border.gives)} - inputs
    items = [item for index, item in _items(staged, span).items() if index not in crossing]
    gradients = staged.gradient_bytes[part] * work.rows / rows
    nodes = _nodes(staged, span, items, np.cumsum(gradients[::-1])[::-1] if gathers else gradients)
    names = [s.node.name if isinstance(s, Compute) else "move" for s in program.steps[part]]
    seconds = [*(rows * work.forward_s + work.call_s)[part]]
    if span.stop == len(program.steps):
        made = round(returned_bytes(staged) * work.rows)
        nodes.append(NodeBytes(2 * made, 3 * made, made))
        names.append("loss")
        seconds.append(0.0)
    masks = (held.beside[part] - held.received[part]).tolist()
    items += [Item(("within", n, 0), round(m), n, {n}) for n, m in enumerate(masks) if m]
    items.sort(key=lambda item: (item.made, item.key))
    # Of what is handed to the next stage, some is not read in this one.
    handed = work.rows * staged.bound_bytes[stage] - held.unsaved_bytes(span, crossing)
    always = sum(held.sizes[index] for index in crossing) + max(handed, 0.0)
    told = Profile(tuple(names), tuple(items), tuple(seconds), (0.0,) * len(names), tuple(nodes))
    return told, always + float(held.received[part].sum())


def returned_bytes(staged: Staged) -> float:
    """Of a sample's outputs, in this tile."""
    sizes = staged.work.held.sizes
    return sum(sizes[index] for index in returned(staged.program)) / staged.work.rows


def _items(staged: Staged, span: range) -> dict[int, Item]:
    """What these steps make, by the value in whose memory it lies; the first of them has the number 0."""
    held, found = staged.work.held, dict[int, Item]()
    for number, index in enumerate(span):
        step = staged.program.steps[index]
        computes = isinstance(step, Compute)
        for ref in step.operands if computes else (step.source,):
            root = held.aliases.get(ref.index, ref.index) if isinstance(ref, Value) else -1
            if root in found:
                found[root].read.add(number)
        for made in step.node.outputs if computes else (step.target,):
            root = held.aliases.get(made, made)
            if root in found:
                found[root].passed.add(number)
                found[root].changed = number if computes and step.in_place else -1
            elif root == made:
                found[root] = Item(("value", root, 0), held.sizes[root], number)
        for root in held.roots[index]:
            if root in found:
                found[root].saved.add(number)
    return found


def _nodes(
    staged: Staged, span: range, items: Sequence[Item], gradients: np.ndarray
) -> list[NodeBytes]:
    """What steps take beside what is held for backward; `gradients` are those of parameters, by step."""
    held, program, count = staged.work.held, staged.program, len(span)
    part = slice(span.start, span.stop)
    passing = held.passing[part]
    made = _alive(count, ((i.made, i.made, i.size_bytes) for i in items if i.saved))
    unsaved = (i for i in items if not i.saved)
    made += _alive(count, ((i.made, max(i.read, default=i.made), i.size_bytes) for i in unsaved))
    # Gradients of what a step reads for the last time are not there before.
    ends = ((n - span.start, held.sizes[v]) for v, n in program.last_use.items() if n in span)
    first = passing - _alive(count, ((n, n, size) for n, size in ends))
    later = np.append(gradients[1:], 0.0)
    rows = (
        made + held.beside[part],
        passing + gradients,
        np.maximum(first, 0.0) + later,
    )
    return [NodeBytes(*(round(value) for value in row)) for row in zip(*rows, strict=True)]


def _alive(count: int, spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """By step: the sum of the bytes of those (first, last, bytes) that have it."""
    change = np.zeros(count + 1)
    for first, last, size in spans:
        change[first] += size
        change[last + 1] -= size
    return np.cumsum(change)[:count]
