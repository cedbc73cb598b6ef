"""All ranks' steps on one axis: where the time of a step goes, and who works longest.

    step time = work + exposed communication          of a rank, in a row of steps
    work      = own computing of phases + time in no phase

Exposed communication is what the recorder calls blocked: the rank could do nothing else. It contains the
waiting for ranks that come late. Windows say it by tag, sums over the whole run say in which phases a tag
blocks: that is how phases are freed of it here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.merging import BYTES_OR_UNKNOWN, LARGEST, MEAN
from fivefold.introspect.run import TracedRun, offsets_ns
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import PHASES, TAGS

__all__ = ["Floats", "Steps", "behind_others"]

Floats = NDArray[np.float64]
ROWS = 500
"""most rows of the axis"""
_TAIL = 1.3
"""a first row that takes so many times the usual is warm-up"""
_SCALARS = ("samples", "cpu_ns", "run_delay_ns", "throttled_ns", "switched", "faults")


@dataclass(frozen=True)
class Steps:
    """Arrays of ranks x rows (x phases or tags), times in seconds per step; nan where a rank has no steps."""

    ranks: NDArray[np.int64]
    first_step: NDArray[np.int64]
    """of a row"""
    per_row: int
    """steps in a row, fewer in the last"""
    count: NDArray[np.int64]
    """steps of a rank in a row"""
    begin_s: Floats
    """of a row, since the first one began"""
    origin_ns: int
    """when that was, by the clock of rank 0's node"""
    seconds: float
    """from the first begin to the last end"""
    wall: Floats
    phase: Floats
    """own time of phases, exposed communication included"""
    phase_cpu: Floats
    operations: Floats
    """by tag, from asking to end"""
    exposed: Floats
    bytes: Floats
    scalars: dict[str, Floats]
    """per step: samples, cpu_ns, ..., sent_bytes, received_bytes, energy_j (nan: unknown)"""
    levels: dict[str, Floats]
    """rss_bytes, gpu_bytes (largest), gpu_busy, ready, loss (mean); nan: unknown"""
    blocked_in: Floats
    """ranks x tags x phases + 1: share of a tag's exposed time within a phase (the last: in none)"""

    @classmethod
    def of(cls, run: TracedRun, rows: int = ROWS) -> Steps | None:
        """None if no step has ended."""
        traces = [t for t in run.ranks if len(t.windows)]
        if not traces:
            return None
        least = min(int(t.windows["first_step"].min()) for t in traces)
        # As 64 bits: the numbers of a damaged trace do not fit into the 32 that they are written with.
        ends = (t.windows["first_step"].astype(np.int64) + t.windows["steps"] for t in traces)
        beyond = max(int(each.max()) for each in ends)
        width = max(1, *(int(t.windows["steps"].max()) for t in traces))
        width *= max(1, math.ceil((beyond - least) / width / rows))
        return _Filling(traces, least, width, math.ceil((beyond - least) / width)).steps()

    @cached_property
    def work(self) -> Floats:
        """A step without exposed communication."""
        return np.maximum(self.wall - self.exposed.sum(2), 0.0)

    @cached_property
    def computing(self) -> Floats:
        """Phases without exposed communication; one more at the end: time in no phase."""
        inside = np.einsum("rbt,rtp->rbp", self.exposed, self.blocked_in)
        outside = np.maximum(self.wall - self.phase.sum(2), 0.0)
        both = np.concatenate([self.phase, outside[:, :, None]], axis=2)
        own = np.maximum(both - inside, 0.0)
        # In which phases a tag blocks is known of the whole run, not of a row: what a phase has not got here
        # was in the others.
        total, elsewhere = own.sum(2), np.maximum(inside - both, 0.0).sum(2)
        left = np.maximum(total - elsewhere, 0.0) / np.where(total > 0, total, 1.0)
        return own * left[:, :, None]

    @cached_property
    def late(self) -> Floats:
        """How much longer a rank works than the median of the others."""
        return behind_others(self.work)

    @cached_property
    def steady(self) -> NDArray[np.bool_]:
        """Rows after warm-up: without the first, and those after it that take far longer than usual."""
        slowest = _largest(self.wall)
        rows = len(slowest)
        if rows < 3:
            return np.ones(rows, bool)
        usual = float(np.nanmedian(slowest[rows // 2 :]))
        begin = 1
        while begin < rows // 2 and slowest[begin] > _TAIL * usual:
            begin += 1
        return np.arange(rows) >= begin

    def mean(self, values: Floats) -> Floats:
        """Mean per steady step of each rank: weighs rows by their steps. nan if a rank has none."""
        begin = int(np.argmax(self.steady))  # all rows from there on
        count, chosen = self.count[:, begin:].astype(float), values[:, begin:]
        if np.isfinite(chosen.sum()) and count.min() > 0:
            weighted = np.einsum("rb...,rb->r...", chosen, count)
            return weighted / count.sum(1).reshape(-1, *[1] * (chosen.ndim - 2))
        weight = count.reshape(*count.shape, *[1] * (chosen.ndim - 2)) * ~np.isnan(chosen)
        total = np.nansum(np.where(weight > 0, chosen, 0.0) * weight, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / weight.sum(1)

    def growth(self, values: Floats) -> Floats:
        """Slope per step over the steady rows of each rank, by least squares; nan with fewer than three."""
        chosen = values[:, self.steady]
        x = np.where(np.isnan(chosen), np.nan, self.first_step[self.steady].astype(float))
        enough = (~np.isnan(chosen)).sum(1) >= 3
        found = np.full(len(values), np.nan)
        x, y = x[enough], chosen[enough]
        x = x - np.nanmean(x, axis=1, keepdims=True)
        found[enough] = np.nansum(x * y, axis=1) / np.maximum(np.nansum(x * x, axis=1), 1e-9)
        return found

    @cached_property
    def step_s(self) -> float:
        """Mean steady step, of the slowest rank in every row."""
        slowest, weight = _largest(self.wall)[self.steady], self.count.max(0)[self.steady]
        return float(np.sum(slowest * weight) / max(1, weight.sum()))

    def index(self, rank: int) -> int:
        """Row of arrays that belongs to a rank."""
        return int(np.flatnonzero(self.ranks == rank)[0])


def behind_others(values: Floats) -> Floats:
    """Each rank's value minus the median of the others', along the first axis; of one rank alone 0.

    >>> behind_others(np.array([[1.0], [2.0], [9.0]]))[:, 0].tolist()
    [-4.5, -3.0, 7.5]
    """
    ranks = len(values)
    if ranks < 2:
        return np.zeros_like(values)
    if ranks > 64 or np.isnan(values).any():  # one more or less does not matter, or nobody knows
        with np.errstate(invalid="ignore"):
            return values - _median(values)
    order = np.argsort(values, axis=0)
    ranked = np.take_along_axis(values, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(ranks).reshape(-1, *[1] * (values.ndim - 1)), axis=0)

    def without(middle: int) -> Floats:
        """What is at `middle` once a rank has been taken out."""
        low, high = ranked[middle], ranked[min(middle + 1, ranks - 1)]
        return np.where(place <= middle, high, low)

    low, high = (ranks - 2) // 2, (ranks - 1) // 2
    return values - (without(low) + without(high)) / 2


def _median(values: Floats) -> Floats:
    known = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1:], np.nan)
    found[known] = np.nanmedian(values[:, known], axis=0)
    return found


def _largest(values: Floats) -> Floats:
    return np.where(np.isnan(values).all(0), 0.0, np.nanmax(np.nan_to_num(values, nan=-1), axis=0))


class _Filling:
    """Puts every rank's windows into rows of `width` steps from `least` on."""

    def __init__(self, traces: list[RankTrace], least: int, width: int, rows: int) -> None:
        self.traces, self.least, self.width, self.rows = traces, least, width, rows
        shape = (len(traces), rows)
        self.count = np.zeros(shape, np.int64)
        self.wall = np.zeros(shape)
        self.phase, self.phase_cpu = np.zeros((2, *shape, len(PHASES)))
        self.tags = np.zeros((3, *shape, len(TAGS)))
        self.scalars = {
            name: np.zeros(shape) for name in (*_SCALARS, *BYTES_OR_UNKNOWN, "energy_j")
        }
        self.levels = {name: np.full(shape, np.nan) for name in (*LARGEST, *MEAN)}
        self.begin = np.full(rows, np.iinfo(np.int64).max)
        self.end = 0

    def steps(self) -> Steps:
        """Fill, and divide by the steps of each row."""
        offsets = offsets_ns(self.traces)
        for index, trace in enumerate(self.traces):
            self._add(index, trace.windows, int(offsets[index]))
        with np.errstate(invalid="ignore", divide="ignore"):
            per = 1.0 / np.where(self.count > 0, self.count, np.nan)
        origin = int(self.begin.min())
        begin = np.maximum.accumulate(np.where(self.count.any(0), self.begin, origin) - origin)
        seconds = 1e-9 * per[:, :, None]
        return Steps(
            np.array([t.rank for t in self.traces]), self.least + self.width * np.arange(self.rows),
            self.width, self.count, begin / 1e9, origin, (self.end - origin) / 1e9,
            self.wall * 1e-9 * per, self.phase * seconds, self.phase_cpu * seconds,
            self.tags[0] * seconds, self.tags[1] * seconds, self.tags[2] * per[:, :, None],
            {name: values * per for name, values in self.scalars.items()}, self.levels,
            np.stack([_blocked_in(t) for t in self.traces]),
        )  # fmt: skip

    def _add(self, rank: int, windows: NDArray[np.void], offset: int) -> None:
        row = (windows["first_step"].astype(np.int64) - self.least) // self.width
        if bool((np.diff(row) < 0).any()):  # a run that went back to a checkpoint
            order = np.argsort(row, kind="stable")
            windows, row = windows[order], row[order]
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        at = row[starts]

        def total(values: NDArray[Any]) -> NDArray[Any]:
            return values if len(starts) == len(row) else np.add.reduceat(values, starts, axis=0)

        self.count[rank, at] = total(windows["steps"].astype(np.int64))
        self.wall[rank, at] = total(windows["end_ns"] - windows["begin_ns"])
        self.phase[rank, at] = total(windows["phase_ns"][:, : len(PHASES)])
        self.phase_cpu[rank, at] = total(windows["phase_cpu_ns"][:, : len(PHASES)])
        for into, name in zip(self.tags, ("tag_ns", "tag_blocked_ns", "tag_bytes"), strict=True):
            into[rank, at] = total(windows[name][:, : len(TAGS)])
        for name in _SCALARS:
            self.scalars[name][rank, at] = total(windows[name].astype(float))
        for name in (*BYTES_OR_UNKNOWN, "energy_j"):
            self.scalars[name][rank, at] = total(_known(windows[name]))
        for name in LARGEST:
            self.levels[name][rank, at] = np.fmax.reduceat(_known(windows[name]), starts)
        for name in MEAN:
            values = windows[name].astype(float)
            known = ~np.isnan(values)
            times = total(known.astype(float))
            self.levels[name][rank, at] = total(np.where(known, values, 0.0)) / np.where(
                times, times, np.nan
            )
        self.begin[at] = np.minimum(self.begin[at], windows["begin_ns"][starts] + offset)
        self.end = max(self.end, int(windows["end_ns"].max()) + offset)


def _known(values: NDArray[Any]) -> Floats:
    """Negative numbers are unknown ones."""
    values = values.astype(float)
    return np.where(values < 0, np.nan, values)


def _blocked_in(trace: RankTrace) -> Floats:
    """Share of each tag's exposed time by phase, over the whole run; the last column is no phase."""
    found = np.zeros((len(TAGS), len(PHASES) + 1))
    sums = trace.sums[(trace.sums["kind"] > 0) & (trace.sums["tag"] < len(TAGS))]
    phase = np.minimum(sums["phase"], len(PHASES))
    np.add.at(found, (sums["tag"], phase), sums["blocked_ns"].astype(float))
    total = found.sum(1, keepdims=True)
    found[total[:, 0] == 0, len(PHASES)] = 1.0
    return found / np.where(total == 0, 1.0, total)
