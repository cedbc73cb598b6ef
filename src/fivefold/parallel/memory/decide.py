"""Which choice fits a number of bytes and costs the least time, by simulated steps.

Nobody knows the best one: items that are spilled share their links, and spans that are computed again free
what others made. From everything kept, changes are made that free the most for their seconds; then each is
taken back where the others suffice, or another does with less. A few ways of beginning are tried. How much is
tried depends on the net alone, not on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fivefold.parallel.memory.simulate import AGAIN, JOINED, KEEP, Simulator, State

__all__ = ["decided", "least", "starts"]

Change = Callable[[State], None]
_ROUNDS = 24
_STEP = 0.2
"""part of what is missing that is freed between two looks at what is cheapest"""
_LEAST = 0.05
"""likewise, of what is missing at first"""
_LARGEST = 48
"""items that are looked at in a round"""
_AT_ONCE = 48
"""changes of a round"""
_SMALLER = 4
"""a part of the largest item that a pool's window is tried with"""
_SEGMENTS = (4, 8, 16)
"""spans that are computed again as a whole, to begin with"""
_KEPT = 3
"""of the ways of beginning, those that are followed to the end"""
_LESS = 0.1
"""part by which the least is to be bettered, at first"""
_SWAPS = 6
_BEST = 24
"""changes that are tried instead of another"""


def decided(simulator: Simulator, limit_bytes: int, near: State | None = None) -> State | None:
    """The best state found whose peak is at most `limit_bytes`; None if there is none.

    With `near`, a state that is almost right, only its neighbours are looked at.
    """
    search = _Search(simulator, limit_bytes)
    if near is not None:
        found = search.freed(near)
        return None if found is None else search.bettered(found)
    begun, followed = starts(simulator), list[State]()
    followed += search.fastest([search.freed(start) for start in begun], _KEPT)
    if simulator.link is not None:
        # Step by step, spilling a little may look cheap until links are full.
        alone = _Search(simulator, limit_bytes, spills=False)
        without = [alone.freed(start) for start in begun if not start.window_bytes]
        followed += search.fastest(without, 1)
        followed += search.fastest([_all_spilled(simulator, start) for start in begun], 1)
    return next(iter(search.fastest([search.bettered(state) for state in followed], 1)), None)


def least(simulator: Simulator) -> list[State]:
    """What holds the least, of the ways that are tried; the best first."""
    begun, less = starts(simulator), _LESS
    tried = _leanest(simulator, [_all_spilled(simulator, start) for start in begun])
    while less > _LESS / 8:
        search = _Search(simulator, int((1 - less) * simulator.run(tried[:1]).peak_bytes[0]))
        if found := [state for start in begun if (state := search.freed(start)) is not None]:
            tried = _leanest(simulator, [*found, *tried])
        else:
            less /= 2
    return tried


def _leanest(simulator: Simulator, states: Sequence[State]) -> list[State]:
    """The same, what holds the least first."""
    order = np.argsort(simulator.run(states).peak_bytes, kind="stable")
    return [states[n] for n in order]


def starts(simulator: Simulator) -> list[State]:
    """To begin a search with: all is kept, or computed again, by units or in a few larger spans."""
    units, largest = simulator.units, int(simulator.sizes.max(initial=0))
    windows = (0,) if simulator.link is None else (0, largest, largest // _SMALLER)
    made: list[State] = []
    for window in windows:
        segments = [_segments(simulator, n) for n in _SEGMENTS if n < units]
        for what in ([KEEP] * units, [AGAIN] * units, *segments):
            state = simulator.start()
            state.units[:], state.window_bytes = what, window
            made.append(state)
    return made


def _segments(simulator: Simulator, segments: int) -> list[int]:
    """Units joined to so many spans of about equal length, which begin where little crosses."""
    units, reach = simulator.units, simulator.units / segments / 2
    cuts = {units}
    for number in range(1, segments):
        middle = number * units / segments
        near = range(max(1, round(middle - reach)), min(units, round(middle + reach) + 1))
        cuts.add(min(near, key=lambda unit: (simulator.crossing[unit], abs(unit - middle))))
    return [AGAIN if unit + 1 in cuts else JOINED for unit in range(units)]


def _all_spilled(simulator: Simulator, start: State) -> State:
    """The largest first, as far as there is room."""
    state = start.copy()
    if simulator.link is not None:
        order = np.argsort(-simulator.spilled_bytes, kind="stable")
        room = np.cumsum(simulator.spilled_bytes[order]) <= simulator.link.room_bytes
        state.spilled[order[room]] = True
    return state


class _Search:
    """For states whose peak is at most a number of bytes."""

    def __init__(self, simulator: Simulator, limit_bytes: int, *, spills: bool = True) -> None:
        self._simulator, self._limit = simulator, limit_bytes
        self._spills = spills and simulator.link is not None

    def freed(self, start: State) -> State | None:
        """A state that fits, after the changes that free the most bytes for their seconds.

        Where spans are joined from the start, what is computed again at once may be too much at once: these
        may be divided. Elsewhere dividing would undo what is joined in the next round.
        """
        divides = bool((start.units == JOINED).any())
        state, run = start.copy(), self._simulator.run
        at_least = _LEAST * (int(run([state]).peak_bytes[0]) - self._limit)
        for _ in range(_ROUNDS):
            now = run([state])
            peak, seconds = int(now.peak_bytes[0]), float(now.seconds[0])
            over = peak - self._limit
            if over <= 0:
                return state
            changes = [*self._changes(state), *(self._splits(state) if divides else ())]
            if not changes:
                break
            told = run([_changed(state, [change]) for change in changes])
            saved = peak - told.peak_bytes
            price = (told.seconds - seconds) / np.clip(saved, 1, over)
            order = [n for n in np.argsort(price, kind="stable") if saved[n] > 0][:_AT_ONCE]
            if not order:
                break
            steps = _one_by_one(state, [changes[n] for n in order])
            peaks = run(steps).peak_bytes
            enough = np.flatnonzero(peaks <= peak - max(over * _STEP, at_least, 1))
            state = steps[int(enough[0] if enough.size else np.argmin(peaks))]
        last = [state, *([_all_spilled(self._simulator, state)] if self._spills else [])]
        fits = np.flatnonzero(run(last).peak_bytes <= self._limit)
        return last[int(fits[0])] if fits.size else None

    def fastest(self, states: Sequence[State | None], most: int) -> list[State]:
        """Of those that fit, so many."""
        made = [state for state in states if state is not None]
        if not made:
            return []
        told = self._simulator.run(made)
        order = np.argsort(told.seconds, kind="stable")
        return [made[n] for n in order if told.peak_bytes[n] <= self._limit][:most]

    def bettered(self, state: State) -> State:
        """Without the changes that are not needed, and with cheaper ones in the place of others."""
        state = self._taken_back(state)
        if not state.spilled.any():
            state.window_bytes = 0
        for _ in range(_SWAPS):
            undo = self._cheapest(state, [*self._undo(state)])
            changes = self._cheapest(state, [*self._changes(state)])
            if not undo or not changes:
                break
            found = self._best(state, [_changed(state, [u, c]) for u in undo for c in changes])
            if found is state:
                break
            state = self._taken_back(found)
        return state

    def _taken_back(self, state: State) -> State:
        while True:
            # To compute again what is spilled may save time, too.
            found = self._together(state, [*self._undo(state), *self._changes(state)])
            if found is state:
                return state
            state = found

    def _together(self, state: State, changes: Sequence[Change]) -> State:
        """The fastest that fits after the best of the changes, as many as go together; or `state`."""
        told = self._simulator.run([state, *(_changed(state, [change]) for change in changes)])
        seconds = np.where(told.peak_bytes <= self._limit, told.seconds, np.inf)
        faster = [n for n in np.argsort(seconds[1:]) if seconds[1 + n] < seconds[0]]
        return self._best(state, _one_by_one(state, [changes[n] for n in faster[:_AT_ONCE]]))

    def _best(self, state: State, others: Sequence[State]) -> State:
        """The fastest that fits, or `state`."""
        if not others:
            return state
        told = self._simulator.run([state, *others])
        seconds = np.where(told.peak_bytes <= self._limit, told.seconds, np.inf)
        best = int(np.argmin(seconds[1:])) + 1
        return others[best - 1] if seconds[best] < seconds[0] * (1 - 1e-9) else state

    def _cheapest(self, state: State, changes: Sequence[Change]) -> list[Change]:
        """Those after which steps take the fewest seconds."""
        told = self._simulator.run([state, *(_changed(state, [change]) for change in changes)])
        more = told.seconds[1:] - told.seconds[0]
        return [changes[n] for n in np.argsort(more, kind="stable")[:_BEST]]

    def _changes(self, state: State) -> Iterator[Change]:
        """What frees memory."""
        units = self._simulator.units
        for unit, what in enumerate(state.units):
            if what == KEEP:
                yield _becomes(unit, AGAIN)
            elif what == AGAIN and unit + 1 < units:
                yield _joins(unit)
        sizes, may = self._simulator.sizes, np.flatnonzero(~state.spilled)
        if not self._spills:
            return
        for number in may[np.argsort(-sizes[may], kind="stable")][:_LARGEST]:
            yield _spills(int(number), True)

    def _splits(self, state: State) -> Iterator[Change]:
        """Less is computed again, or less of it at once."""
        for unit, what in enumerate(state.units):
            if what != KEEP:
                yield _becomes(unit, KEEP)
            if what == JOINED:
                yield _becomes(unit, AGAIN)

    def _undo(self, state: State) -> Iterator[Change]:
        """What saves time."""
        yield from self._splits(state)
        for number in np.flatnonzero(state.spilled):
            yield _spills(int(number), False)


def _changed(state: State, changes: Sequence[Change]) -> State:
    made = state.copy()
    for change in changes:
        change(made)
    return made


def _one_by_one(state: State, changes: Sequence[Change]) -> list[State]:
    """With the first change, with the first two, and so on."""
    return [_changed(state, changes[: n + 1]) for n in range(len(changes))]


def _becomes(unit: int, what: int) -> Change:
    def change(state: State) -> None:
        state.units[unit] = what

    return change


def _joins(unit: int) -> Change:
    def change(state: State) -> None:
        state.units[unit] = JOINED
        if state.units[unit + 1] == KEEP:
            state.units[unit + 1] = AGAIN

    return change


def _spills(number: int, spilled: bool) -> Change:
    def change(state: State) -> None:
        state.spilled[number] = spilled

    return change
