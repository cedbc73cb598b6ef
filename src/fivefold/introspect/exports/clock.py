"""One time for all ranks: that of rank 0's node, from the first thing recorded on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.reader import RankTrace

__all__ = ["begin_ns", "offset_ns", "seconds", "wall_s"]


def offset_ns(trace: RankTrace) -> int:
    """What is added to a rank's times to get those of rank 0's node; 0 where it was not measured."""
    value = trace.meta.get("clock_offset_ns", 0)
    return int(value) if isinstance(value, int | float) else 0


def begin_ns(traces: Sequence[RankTrace]) -> int:
    """The earliest time of any event or step of any rank, on rank 0's clock; 0 if there is none."""
    firsts = [
        int(table["begin_ns"].min()) + offset_ns(trace)
        for trace in traces
        for table in (trace.events, trace.windows)
        if len(table)
    ]
    return min(firsts, default=0)


def seconds(trace: RankTrace, times_ns: NDArray[np.int64], zero_ns: int) -> NDArray[np.float64]:
    """Times of a rank in seconds after `zero_ns`; nan where they are 0, which means none."""
    found = (times_ns + (offset_ns(trace) - zero_ns)) / 1e9
    return np.where(times_ns == 0, np.nan, found)


def wall_s(trace: RankTrace, time_ns: int) -> float:
    """A rank's time as seconds since 1970, as its node's calendar had it."""
    meta = trace.meta
    wall, monotonic = meta.get("wall_ns", 0), meta.get("monotonic_ns", 0)
    return (float(wall) + (time_ns - float(monotonic))) / 1e9
