"""When ranks come to the same operation: who is late, and who waits for whom.

The same operation has the same number in its group on all ranks. A rank arrives when it asks for it. The
last one to arrive makes all others wait; how long it then takes is the communication itself.

    rank 0   asks ├─────────── blocked ─────────────┤
    rank 1                     asks ├─── blocked ───┤
                                     │   transfer
                                     └ all have come

The backend fivefold tells exactly when all had come, which is later than the last one asked where operations
wait for each other. Of other backends it is when the last one asked, by clocks that were aligned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.groups import Group
from fivefold.introspect.run import TracedRun
from fivefold.introspect.steps import Floats, behind_others
from fivefold.trace.fold import bit_lengths
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import KINDS

__all__ = ["Meeting", "Meetings", "Transfer", "meetings"]

_TOGETHER = np.ones(256, bool)
"""by kind: whether its numbers are the same on all ranks of a group"""
_TOGETHER[[KINDS.index(kind) for kind in ("span", "send", "receive", "exchange")]] = False


@dataclass(frozen=True)
class Transfer:
    """Key of how long communication takes once all have come."""

    kind: int
    tag: int
    group: str
    bucket: int


@dataclass(frozen=True)
class Meeting:
    """Operations of a group that all its ranks that were read have in their rings; ranks x operations."""

    group: Group
    ranks: NDArray[np.int64]
    number: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]
    """by the clock of rank 0's node"""
    blocked_ns: NDArray[np.int64]
    waiting_ns: NDArray[np.int64]
    """of it, before all had come"""
    served_ns: NDArray[np.int64]
    """of the last rank: from when all had come to the end. Where that is not told, from when it asked, or
    from the end of the group's operation before"""
    first: NDArray[np.void]
    """the event as the first of `ranks` has it"""
    phase: NDArray[np.int64]

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """Index in `ranks` of who came last."""
        return np.argmax(self.arrival_ns, axis=0)

    @cached_property
    def widest(self) -> NDArray[np.int64]:
        """Of each step, the operation whose arrivals are farthest apart."""
        order = np.lexsort((-self.skew_ns, self.first["step"]))
        return order[np.unique(self.first["step"][order], return_index=True)[1]]

    @cached_property
    def skew_ns(self) -> NDArray[np.int64]:
        """From the first arrival to the last."""
        return self.arrival_ns.max(0) - self.arrival_ns.min(0)


@dataclass
class Meetings:
    """All meetings of a run, added up. Times in seconds."""

    ranks: NDArray[np.int64]
    met: list[Meeting]
    late_s: Floats
    """lateness of each rank behind the median of the others, at the operation of a step whose arrivals are
    farthest apart, mean over steps; nan: met nobody"""
    last_share: Floats
    """of the steps, those in which a rank came last to that operation"""
    waited_s: Floats
    """ranks x ranks: how long the row was blocked until the column came, in all meetings"""
    steps: int
    """that the meetings are of"""
    first_step: int | None
    last_step: int | None
    served_s: dict[Transfer, Floats] = field(default_factory=dict[Transfer, Floats])
    waiting_share: dict[Transfer, float] = field(default_factory=dict[Transfer, float])
    """of the time in which ranks were blocked, before all had come"""

    @property
    def compared(self) -> int:
        """Operations that were found on all ranks of their group."""
        return sum(len(meeting.number) for meeting in self.met)


def meetings(
    run: TracedRun, known: Mapping[tuple[int, int], Group], first_step: int = 0
) -> Meetings:
    """Compare arrivals in steps from `first_step` on, or in all if there are none."""
    found = [m for m in _all(run, known, first_step) if len(m.number)]
    if not found and first_step:
        found = [m for m in _all(run, known, 0) if len(m.number)]
    ranks = np.array([trace.rank for trace in run.ranks])
    size = len(ranks)
    late, times, last = np.zeros((3, size))
    waited = np.zeros((size, size))
    served: dict[Transfer, list[Floats]] = defaultdict(list)
    blocked: dict[Transfer, Floats] = defaultdict(lambda: np.zeros(2))
    for meeting in found:
        at = np.searchsorted(ranks, meeting.ranks)
        widest = meeting.widest
        late[at] += behind_others(meeting.arrival_ns[:, widest].astype(float)).sum(1) / 1e9
        times[at] += len(widest)
        apart = widest[meeting.skew_ns[widest] > 0]
        last[at] += np.bincount(meeting.last[apart], minlength=len(at))
        _wait(waited, at, meeting)
        for key, same in _by_transfer(meeting):
            served[key].append(meeting.served_ns[same] / 1e9)
            blocked[key] += [
                table[:, same].sum() for table in (meeting.waiting_ns, meeting.blocked_ns)
            ]
    steps = np.concatenate([m.first["step"] for m in found]) if found else np.zeros(0, np.int64)
    times[times == 0] = np.nan
    return Meetings(
        ranks, found, late / times, last / times, waited, len(np.unique(steps)),
        int(steps.min()) if len(steps) else None, int(steps.max()) if len(steps) else None,
        {key: np.concatenate(parts) for key, parts in served.items()},
        {key: float(waiting / whole) for key, (waiting, whole) in blocked.items() if whole > 0},
    )  # fmt: skip


def _wait(waited: Floats, at: NDArray[np.int64], meeting: Meeting) -> None:
    last = meeting.arrival_ns.max(0)
    # Who did not wait for the result was not kept by who came late, nor by an operation before this one.
    kept = np.minimum(last - meeting.arrival_ns, meeting.waiting_ns) / 1e9
    for column in np.unique(meeting.last):
        waited[at, at[column]] += kept[:, meeting.last == column].sum(1)


def _by_transfer(meeting: Meeting) -> list[tuple[Transfer, NDArray[np.bool_]]]:
    """Which operations are alike."""
    buckets = bit_lengths(meeting.first["size_bytes"])
    codes = (
        buckets
        + 256 * meeting.first["tag"].astype(np.int64)
        + 65536 * meeting.first["kind"].astype(np.int64)
    )
    return [
        (
            Transfer(int(code) >> 16, int(code) >> 8 & 255, meeting.group.name, int(code) & 255),
            codes == code,
        )
        for code in np.unique(codes)
    ]


# --- the same operations on all ranks --------------------------------------------------------------


@dataclass
class _Part:
    """One rank's operations of a group, by number."""

    rank: int
    events: NDArray[np.void]
    served_ns: NDArray[np.int64]
    offset_ns: int


def _all(run: TracedRun, known: Mapping[tuple[int, int], Group], first_step: int) -> list[Meeting]:
    parts: dict[Group, list[_Part]] = defaultdict(list)
    for trace in run.ranks:
        for index, part in _parts(trace, first_step):
            group = known.get((trace.rank, index))
            if group is not None and group.size > 1:
                parts[group].append(part)
    return [_meeting(group, found) for group, found in parts.items() if len(found) > 1]


def _parts(trace: RankTrace, first_step: int) -> list[tuple[int, _Part]]:
    events = trace.events
    chosen = _TOGETHER[events["kind"]] & (events["end_ns"] > 0)
    events = events[chosen]
    found: list[tuple[int, _Part]] = []
    for index in np.unique(events["group"]):
        own = events[events["group"] == index]
        before = np.maximum.accumulate(np.concatenate([[0], own["end_ns"][:-1]]))
        # One whose end was seen late, for nobody waited for it, did not hold up those that ended before.
        before = np.where(before < own["end_ns"], before, 0)
        served = own["end_ns"] - np.maximum(own["begin_ns"], before)
        own, served = own[own["step"] >= first_step], served[own["step"] >= first_step]
        number, at = np.unique(own["number"], return_index=True)
        if len(number):
            offset = int(trace.meta.get("clock_offset_ns") or 0)
            found.append(
                (int(index), _Part(trace.rank, own[at], np.maximum(served[at], 0), offset))
            )
    return found


def _meeting(group: Group, parts: list[_Part]) -> Meeting:
    common = parts[0].events["number"]
    for part in parts[1:]:
        common = np.intersect1d(common, part.events["number"], assume_unique=True)
    at = [np.searchsorted(part.events["number"], common) for part in parts]

    def table(name: str) -> NDArray[np.int64]:
        rows = [part.events[name][where] for part, where in zip(parts, at, strict=True)]
        return np.stack(rows).astype(np.int64)

    offset = np.array([part.offset_ns for part in parts])[:, None]
    arrival, end, blocked = (
        table("begin_ns") + offset,
        table("end_ns") + offset,
        table("blocked_ns"),
    )
    served = np.stack([part.served_ns[where] for part, where in zip(parts, at, strict=True)])
    last = np.argmax(arrival, axis=0) if len(common) else np.zeros(0, np.int64)
    told = table("start_ns")
    started = np.maximum(np.where(told > 0, told + offset, 0), arrival).max(0)
    # Nobody is blocked before asking, and who is blocked is so until the end.
    waiting = np.minimum(started, end) - np.maximum(arrival, end - blocked)
    served = np.where((told > 0).all(0), np.maximum(end - started, 0), served)
    return Meeting(
        group, np.array([part.rank for part in parts]), common.astype(np.int64), arrival, blocked,
        np.maximum(waiting, 0), served[last, np.arange(len(common))], parts[0].events[at[0]], table("phase"),
    )  # fmt: skip
