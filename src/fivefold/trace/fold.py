"""Adding events up: rows of a kind, tag, phase, group, element type and size become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.schema import BINS, SUM

__all__ = ["KEY", "bit_lengths", "folded", "merge"]

KEY = ("kind", "tag", "phase", "group", "dtype", "bucket")
"""fields that two rows of sums differ in"""


def folded(events: NDArray[np.void]) -> NDArray[np.void]:
    """Rows of sums of events that have ended, one per key, in the order of keys."""
    keys = np.zeros((len(events), 8), np.uint8)
    for column, name in enumerate(KEY[:-1]):
        keys[:, column] = events[name]
    keys[:, 5] = bit_lengths(events["size_bytes"])
    codes, first, which = np.unique(
        keys.view(np.uint64)[:, 0], return_index=True, return_inverse=True
    )
    rows = np.zeros(len(codes), SUM)
    for column, name in enumerate(KEY):
        rows[name] = keys[first, column]
    took = np.maximum(events["end_ns"] - events["begin_ns"], 0)
    rows["count"] = np.bincount(which, minlength=len(codes))
    for name, values in (
        ("size_bytes", events["size_bytes"]), ("total_ns", took),
        ("blocked_ns", events["blocked_ns"]), ("cpu_ns", events["cpu_ns"]),
    ):  # fmt: skip
        np.add.at(rows[name], which, values)
    rows["min_ns"] = np.iinfo(np.int64).max
    np.minimum.at(rows["min_ns"], which, took)
    np.maximum.at(rows["max_ns"], which, took)
    np.add.at(rows["histogram"], (which, np.minimum(bit_lengths(took), BINS - 1)), 1)
    return rows


def merge(rows: NDArray[np.void], used: int, more: NDArray[np.void]) -> tuple[int, int]:
    """Add `more` to the first `used` of `rows`; how many are used now, and events that found no row."""
    index = {bytes(_key(rows[i])): i for i in range(used)}
    lost = 0
    for row in more:
        at = index.get(bytes(_key(row)))
        if at is None:
            if used == len(rows):
                lost += int(row["count"])
                continue
            rows[used] = row
            index[bytes(_key(row))] = used
            used += 1
            continue
        for name in ("count", "size_bytes", "total_ns", "blocked_ns", "cpu_ns", "histogram"):
            rows[at][name] += row[name]
        rows[at]["min_ns"] = min(rows[at]["min_ns"], row["min_ns"])
        rows[at]["max_ns"] = max(rows[at]["max_ns"], row["max_ns"])
    return used, lost


def _key(row: np.void) -> bytes:
    return row.tobytes()[: len(KEY)]


def bit_lengths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `int.bit_length`, of numbers from 0 on."""
    lengths = np.zeros(values.shape, np.int64)
    rest = values.astype(np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        high = rest >= (1 << step)
        lengths[high] += step
        rest = np.where(high, rest >> step, rest)
    return lengths + (rest > 0)
