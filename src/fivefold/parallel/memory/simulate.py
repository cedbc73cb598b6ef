"""Training steps under choices, simulated: how long they take, and the most that they hold.

Nodes are joined to units, each of which ends with an operation that waits for the processor: computing a unit
again spares this one, since it saves its operands before it computes.

    unit   norm relu conv | norm relu conv | norm add relu conv | ...
    state  KEEP             AGAIN            JOINED with the next, so that nothing is held between them

Copies out queue up behind each other in forward, those back in backward; what does not hide is waited for.
Many states are simulated at once. Shapes have B for states, U for units, N for nodes, I for items.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.parallel.memory.choice import Choice, NodeSpan
from fivefold.parallel.memory.profile import Item, Profile

__all__ = ["AGAIN", "JOINED", "KEEP", "Link", "Simulated", "Simulator", "State"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

KEEP, AGAIN, JOINED = 0, 1, 2
_MOST_UNITS = 160
_NEVER = 1 << 40
"""number of a unit that there is not"""


@dataclass(frozen=True)
class Link:
    """How fast copies are while a net computes."""

    out_bytes_per_s: float
    back_bytes_per_s: float
    drag_s_per_byte: float = 0.0
    """how much longer computing takes for each byte that is copied meanwhile"""
    room_bytes: int = _NEVER
    """how much may be spilled at once"""


@dataclass
class State:
    """A choice under way: what each unit does (U,), and whether items are spilled (I,)."""

    units: Ints
    spilled: Bools
    window_bytes: int = 0
    """of the pool; the net waits for copies of what is larger"""

    def copy(self) -> State:
        """One that may be changed."""
        return State(self.units.copy(), self.spilled.copy(), self.window_bytes)


@dataclass(frozen=True)
class Simulated:
    """What steps are told to take."""

    seconds: Floats
    """(B,)"""
    peak_bytes: Ints
    """(B,)"""
    out_s: Floats
    """(B, U): when copies of what a unit makes begin; nan where there are none"""
    back_s: Floats
    """(B, U): when those begin that its backward needs"""


@dataclass(frozen=True)
class _Placed:
    """States, and what follows from what their units do."""

    again: Bools
    """(B, U)"""
    group: Ints
    """(B, U): units that are computed again together have a number"""
    first: Ints
    """(B, U): the first of a unit's group"""
    last: Ints
    """(B, U)"""

    @classmethod
    def of(cls, units: Ints) -> _Placed:
        count = units.shape[1]
        begins = np.ones(units.shape, bool)
        begins[:, 1:] = (units[:, :-1] != JOINED) | (units[:, 1:] == KEEP)
        ends = np.ones(units.shape, bool)
        ends[:, :-1] = begins[:, 1:]
        at = np.arange(count)
        first = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
        last = np.minimum.accumulate(np.where(ends, at, count)[:, ::-1], axis=1)[:, ::-1]
        return cls(units != KEEP, np.cumsum(begins, axis=1), first, last)


@dataclass(frozen=True)
class _Fates:
    """What becomes of items, (B, I)."""

    low: Ints
    """the first node whose backward needs what is held; _NEVER if nothing is held"""
    high: Ints
    """the last one"""
    kept: Bools
    spilled: Bools
    made_again: Ints
    """the first node whose backward needs it after its group was computed again; or _NEVER"""


class Simulator:
    """Of one profile."""

    def __init__(self, profile: Profile, link: Link | None) -> None:
        self.profile, self.link = profile, link
        self.bounds = _units(profile)
        """units are [bounds[i], bounds[i + 1])"""
        spans = [range(a, b) for a, b in itertools.pairwise(self.bounds)]
        self._unit_of = np.repeat(np.arange(len(spans)), np.diff(self.bounds))
        """(N,)"""
        self._first_node, self._last_node = (
            np.array(self.bounds[:-1]),
            np.array(self.bounds[1:]) - 1,
        )
        """(U,)"""
        self.items = profile.items
        self.sizes = np.array([item.size_bytes for item in self.items], np.int64)
        self._copies = np.array([item.copies for item in self.items], np.int64)
        self.spilled_bytes = self.sizes * self._copies
        """(I,): what each takes where it is spilled"""
        self._made_at = np.array([item.made for item in self.items], np.int64)
        self._made = self._unit_of[self._made_at]
        self._last_read = np.array(list(map(_last_read, self.items)), np.int64)
        self._savers = _pairs([item.saved for item in self.items])
        self._readers = _pairs([item.read for item in self.items])
        crossing = _crossing(profile)
        self.crossing = [crossing[bound] for bound in self.bounds]
        """by unit: bytes of what it and later ones read of earlier ones"""
        self.forward_s = np.array([sum(profile.seconds[n] for n in span) for span in spans])
        self._backward_s = np.array([sum(profile.backward_s[n] for n in span) for span in spans])
        self._spared_s = np.array([
            profile.seconds[span[-1]] if profile.heavy(span[-1]) else 0.0 for span in spans
        ])  # fmt: skip
        self._work = _Work.of(profile, spans)

    @property
    def units(self) -> int:
        """Their number."""
        return len(self.bounds) - 1

    def start(self) -> State:
        """Everything is kept."""
        return State(np.zeros(self.units, np.int64), np.zeros(len(self.items), bool))

    def run(self, states: Sequence[State]) -> Simulated:
        """A step under each."""
        units = np.stack([state.units for state in states])
        spilled = np.stack([state.spilled for state in states])
        window = np.array([state.window_bytes for state in states])
        placed = _Placed.of(units)
        fates = self._fates(placed, spilled)
        seconds, out_s, back_s = self._seconds(placed, fates, window)
        peak = self._peak(placed, fates, window)
        if self.link is not None:  # what finds no room is not spilled, and so fits nowhere
            over = (fates.spilled * self.spilled_bytes).sum(axis=1) - self.link.room_bytes
            peak += np.where(over > 0, _NEVER + over, 0)
        return Simulated(seconds, peak, out_s, back_s)

    def _fates(self, placed: _Placed, spilled: Bools) -> _Fates:
        again, group = placed.again, placed.group
        (owner, saver), (reading, reader) = self._savers, self._readers
        unit, reads, made = self._unit_of[saver], self._unit_of[reader], self._made
        with_own = again[:, unit] & (group[:, unit] == group[:, made[owner]])
        made_again = _least(np.where(with_own, saver, _NEVER), owner, len(made))
        # What a span takes is held till it has gone through backward.
        apart = again[:, reads] & (group[:, reads] != group[:, made[reading]])
        first, last = self._first_node[placed.first], self._last_node[placed.last]
        low = np.minimum(
            _least(np.where(again[:, unit], _NEVER, saver), owner, len(made)),
            _least(np.where(apart, first[:, reads], _NEVER), reading, len(made)),
        )
        high = -np.minimum(
            _least(np.where(again[:, unit], _NEVER, -saver), owner, len(made)),
            _least(np.where(apart, -last[:, reads], _NEVER), reading, len(made)),
        )
        held = low < _NEVER
        return _Fates(low, high, held & ~spilled, held & spilled, made_again)

    def _seconds(
        self, placed: _Placed, fates: _Fates, window: Ints
    ) -> tuple[Floats, Floats, Floats]:
        states, units = placed.again.shape
        out_s, back_s = np.full((2, states, units), np.nan)
        now = np.zeros(states)
        link = self.link if fates.spilled.any() else None
        waits = self.sizes > window[:, None]
        leaving = arriving = np.zeros((2, states, units))
        if link is not None:
            sizes = [fates.spilled * self.sizes * some for some in (~waits, waits)]
            leaving = np.stack([_by_unit(some, self._made, units) for some in sizes])
            ends = self._unit_of[np.clip(fates.high, 0, len(self._unit_of) - 1)]  # of what is held
            arriving = np.stack([_by_fate(some, ends, units) for some in sizes])
        free = now
        for unit in range(units):
            now = now + self.forward_s[unit]
            if link is not None:
                size, at_once = leaving[:, :, unit]
                some = size + at_once > 0
                room = np.maximum(window - size, 0) / link.out_bytes_per_s
                begin = np.maximum(now, free - np.where(at_once > 0, 0, room))
                begin += (size + at_once) * link.drag_s_per_byte
                now = np.where(some, begin + at_once / link.out_bytes_per_s, now)
                out_s[:, unit] = np.where(some, np.maximum(begin, free), np.nan)
                ends = np.maximum(now, free) + size / link.out_bytes_per_s
                free = np.where(some, ends, free)
        again_s = self._again_s(placed)
        free = now  # what goes out last is there still: nothing waits for it
        for unit in reversed(range(units)):
            if link is not None:
                size, at_once = arriving[:, :, unit]
                some = size + at_once > 0
                begin = np.maximum(free, now - window / link.back_bytes_per_s)
                back_s[:, unit] = np.where(some, begin, np.nan)
                free = np.where(some, begin + size / link.back_bytes_per_s, free)
                begin = np.maximum(now, free) + (size + at_once) * link.drag_s_per_byte
                now = np.where(some, begin + at_once / link.back_bytes_per_s, now)
                free = np.where(at_once > 0, now, free)
            now = now + again_s[:, unit] + self._backward_s[unit]
        return now, out_s, back_s

    def _peak(self, placed: _Placed, fates: _Fates, window: Ints) -> Ints:
        """Where it is.

        forward     held of earlier nodes + what they made that is read still + the node's own
        backward    held and not let go + fetched + made again + the node's own
        """
        nodes = len(self._unit_of)
        kept, spilled = fates.kept * self.sizes, fates.spilled * self.sizes
        goes = np.where(fates.kept, nodes, self._last_read + 1)
        there = _between(self.sizes[None].repeat(len(kept), 0), self._made_at + 1, goes, nodes)
        forward = there + self._work.node + window[:, None]
        # Of other micro-batches than the one whose backward it is.
        others = (kept * (self._copies - 1)).sum(axis=1)
        alive = np.cumsum(_by_fate(kept, fates.low, nodes), axis=1)
        alive += _between(spilled, fates.low, fates.high + 1, nodes)
        found, last = fates.made_again, self._last_node[placed.last]
        again = np.where(found < _NEVER, self.sizes, 0)
        computed = _between(again, np.minimum(found, nodes), last[:, self._made] + 1, nodes)
        backward = alive + computed + self._work.backward + window[:, None]
        # As the backward of a group's last unit begins, the group is computed again, node by node.
        before = np.take_along_axis(alive, last, axis=1) + self._work.gradients[placed.last]
        made = _by_unit(again, self._made_at, nodes)
        so_far = np.cumsum(made, axis=1) - made
        before -= np.take_along_axis(so_far, self._first_node[placed.first], axis=1)
        read = np.minimum(self._last_read, last[:, self._made]) + 1
        so_far += _between(self.sizes - again, self._made_at + 1, read, nodes)
        unit = self._unit_of
        own = np.where(self._work.spared & (placed.last[:, unit] == unit), 0, self._work.node)
        while_again = before[:, unit] + so_far + own + window[:, None]
        while_again = np.where(placed.again[:, unit], while_again, 0)
        return (
            np.max([most.max(axis=1) for most in (forward, backward, while_again)], axis=0) + others
        )

    def held(self, state: State) -> tuple[Ints, Ints]:
        """By unit (U,): bytes of what it makes that are kept for backward, and that are spilled."""
        placed = _Placed.of(state.units[None])
        fates = self._fates(placed, state.spilled[None])
        kept, spilled = (
            _by_unit(some * self.sizes, self._made, self.units)[0]
            for some in (fates.kept, fates.spilled)
        )
        return kept, spilled

    def again_s(self, state: State) -> Floats:
        """By unit (U,): seconds of computing it again."""
        return self._again_s(_Placed.of(state.units[None]))[0]

    def _again_s(self, placed: _Placed) -> Floats:
        """(B, U)"""
        last = placed.last == np.arange(self.units)
        more = np.where(last, self.profile.span_s - self._spared_s, 0.0)
        return np.where(placed.again, self.forward_s + more, 0.0)

    def choice(self, state: State) -> Choice:
        """A state as what a run of the program is given."""
        spans: list[NodeSpan] = []
        group = _Placed.of(state.units[None]).group[0]
        for unit, what in enumerate(state.units):
            first, stop, again = self.bounds[unit], self.bounds[unit + 1], bool(what != KEEP)
            joins = spans and spans[-1].again == again
            if joins and (not again or group[unit] == group[unit - 1]):
                spans[-1] = NodeSpan(spans[-1].first, stop, again)
            else:
                spans.append(NodeSpan(first, stop, again))
        spilled = (self.items[n] for n in np.flatnonzero(state.spilled))
        keys = (key for item in spilled for key in (item.key, *item.names))
        return Choice(tuple(spans), frozenset(keys))


@dataclass(frozen=True)
class _Work:
    """What is taken beside what is held."""

    gradients: Ints
    """(U,), as the backward of a node of it begins"""
    node: Ints
    """(N,), in forward"""
    backward: Ints
    """(N,)"""
    spared: Bools
    """(N,): whether it is not computed again at the end of a span"""

    @classmethod
    def of(cls, profile: Profile, spans: Sequence[range]) -> _Work:
        nodes = profile.nodes
        own = np.array([node.forward for node in nodes], np.int64)
        for item in profile.items:  # what is not held yet counts as the node's
            stop = min(_last_read(item), min(item.saved, default=len(nodes))) + 1
            own[item.made + 1 : stop] -= item.size_bytes
        spared = np.zeros(len(nodes), bool)
        spared[[span[-1] for span in spans if profile.heavy(span[-1])]] = True
        gradients = np.array([max(nodes[n].gradients for n in span) for span in spans], np.int64)
        backward = np.array([node.backward for node in nodes], np.int64)
        return cls(gradients, own.clip(0), backward, spared)


def _last_read(item: Item) -> int:
    """The last node whose forward needs it."""
    return max((*item.read, *item.saved, item.made))


def _pairs(nodes: Sequence[set[int]]) -> tuple[Ints, Ints]:
    """(item, node) for all, in the order of items."""
    found = [(item, node) for item, own in enumerate(nodes) for node in sorted(own)]
    items, numbers = np.array(found, np.int64).reshape(-1, 2).T
    return items, numbers


def _least(values: Ints, owners: Ints, items: int) -> Ints:
    """(B, pairs) -> (B, items): the least of each item's pairs; _NEVER without any."""
    found = np.full((len(values), items), _NEVER)
    if owners.size:
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        found[:, owners[starts]] = np.minimum.reduceat(values, starts, axis=1)
    return found


def _by_unit(values: Ints, unit: Ints, units: int) -> Ints:
    """(B, I) -> (B, U): sums of the items of each unit."""
    found = np.zeros((units, len(values)), np.int64)
    np.add.at(found, unit, values.T)
    return found.T


def _by_fate(values: Ints, unit: Ints, units: int) -> Ints:
    """The same where units (B, I) differ from state to state; what has none is left out."""
    states = len(values)
    at = np.where((unit >= 0) & (unit < units), unit, units) + np.arange(states)[:, None] * (
        units + 1
    )
    found = np.bincount(at.ravel(), values.ravel(), states * (units + 1))
    return found.reshape(states, units + 1)[:, :units].astype(np.int64)


def _between(values: Ints, first: Ints, stop: Ints, units: int) -> Ints:
    """(B, I) -> (B, U): sums of the items whose [first, stop) has the unit."""
    shape = values.shape
    change = _by_fate(values, np.broadcast_to(first, shape), units)
    change -= _by_fate(values, np.broadcast_to(stop, shape), units)
    return np.cumsum(change, axis=1)


def _units(profile: Profile) -> list[int]:
    """After what waits for the processor, and where little crosses: what a block of a net gives the next."""
    nodes = len(profile.names)
    cuts = {n + 1 for n in range(nodes) if profile.heavy(n)}
    crossing = _crossing(profile)
    for item in profile.items:
        if len(item.read - item.passed) > 1 and crossing[item.made + 1] <= item.size_bytes:
            cuts.add(item.made + 1)
    for item in profile.items:
        # Apart from what made it, a change in place would need a memory of its own.
        cuts -= set(range(item.made + 1, item.changed + 1))
    ordered = sorted(cut for cut in cuts if 0 < cut < nodes)
    each = -(-len(ordered) // _MOST_UNITS) or 1
    return [0, *ordered[::each], nodes]


def _crossing(profile: Profile) -> list[int]:
    """By node: bytes of values that are made before it, and that it or later nodes read."""
    change = [0] * (len(profile.names) + 2)
    for item in profile.items:
        if item.read:
            change[item.made + 1] += item.size_bytes
            change[max(item.read) + 1] -= item.size_bytes
    return list(itertools.accumulate(change))
