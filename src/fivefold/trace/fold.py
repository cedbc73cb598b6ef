"""Adding events up: rows of a kind, tag, phase, group, element type and size become one."""

from __future__ import annotations

from typing import cast

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
    codes = keys.view(np.uint64)[:, 0]
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    begins = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
    if not len(events):
        return np.zeros(0, SUM)
    rows = np.zeros(len(begins), SUM)
    for column, name in enumerate(KEY):
        rows[name] = keys[order[begins], column]
    took = np.maximum(events["end_ns"] - events["begin_ns"], 0)[order]
    rows["count"] = counts = np.diff(begins, append=len(events))
    rows["total_ns"] = np.add.reduceat(took, begins)
    rows["min_ns"] = np.minimum.reduceat(took, begins)
    rows["max_ns"] = np.maximum.reduceat(took, begins)
    for name in ("size_bytes", "blocked_ns", "cpu_ns"):
        rows[name] = np.add.reduceat(events[name][order], begins)
    which = np.repeat(np.arange(len(begins)), counts)
    bins = np.minimum(bit_lengths(took), BINS - 1)
    rows["histogram"] = np.bincount(which * BINS + bins, minlength=len(rows) * BINS).reshape(
        -1, BINS
    )
    return rows


def merge(rows: NDArray[np.void], used: int, more: NDArray[np.void]) -> tuple[int, int]:
    """Add `more` to the first `used` of `rows`; how many are used now, and events that found no row."""
    index = {key: row for row, key in enumerate(_keys(rows[:used]))}
    lost = 0
    old: list[int] = []
    into: list[int] = []
    for number, key in enumerate(_keys(more)):
        at = index.get(key)
        if at is not None:
            old.append(number)
            into.append(at)
        elif used == len(rows):
            lost += int(more[number]["count"])
        else:
            rows[used] = more[number]
            index[key] = used
            used += 1
    if old:
        added = more[old]
        for name in ("count", "size_bytes", "total_ns", "blocked_ns", "cpu_ns", "histogram"):
            rows[name][into] += added[name]
        rows["min_ns"][into] = np.minimum(rows["min_ns"][into], added["min_ns"])
        rows["max_ns"][into] = np.maximum(rows["max_ns"][into], added["max_ns"])
    return used, lost


def _keys(rows: NDArray[np.void]) -> list[int]:
    """The fields of `KEY`, with which a row begins, as one number each."""
    keys = np.zeros((len(rows), 8), np.uint8)
    for column, name in enumerate(KEY):
        keys[:, column] = rows[name]
    return cast("list[int]", keys.view(np.uint64)[:, 0].tolist())


def bit_lengths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `int.bit_length`, of numbers from 0 to 2**53."""
    _, exponents = np.frexp(values.astype(np.float64))
    return exponents.astype(np.int64)
