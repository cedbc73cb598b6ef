"""Rows of windows put together: several steps become one row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.schema import WINDOW

__all__ = ["BYTES_OR_UNKNOWN", "LARGEST", "MEAN", "SUMS", "merged"]

SUMS = (
    "steps", "phase_ns", "phase_cpu_ns", "tag_ns", "tag_blocked_ns", "tag_bytes", "samples", "cpu_ns",
    "run_delay_ns", "throttled_ns", "switched", "faults",
)  # fmt: skip
"""fields of windows that are added up"""
BYTES_OR_UNKNOWN = ("sent_bytes", "received_bytes")
"""added up where they are known"""
LARGEST = ("rss_bytes", "gpu_bytes")
MEAN = ("loss", "gpu_busy", "ready")
"""mean of the known ones"""


def merged(windows: NDArray[np.void], rows: int) -> NDArray[np.void]:
    """At most `rows` rows, each of as many neighbours as needed. Fields unknown to us are lost."""
    if len(windows) <= rows:
        return windows
    starts = np.arange(0, len(windows), -(-len(windows) // rows))
    found = np.zeros(len(starts), WINDOW)
    ends = np.append(starts[1:], len(windows)) - 1
    found["first_step"], found["begin_ns"] = (
        windows["first_step"][starts],
        windows["begin_ns"][starts],
    )
    found["end_ns"] = windows["end_ns"][ends]
    for name in SUMS:
        found[name] = np.add.reduceat(windows[name], starts, axis=0)
    for name in LARGEST:
        found[name] = np.maximum.reduceat(windows[name], starts)
    for name in BYTES_OR_UNKNOWN:
        known = windows[name] >= 0
        total = np.add.reduceat(np.where(known, windows[name], 0), starts)
        found[name] = np.where(np.add.reduceat(known, starts) > 0, total, -1)
    for name in (*MEAN, "energy_j"):
        found[name] = _known(windows[name], starts, mean=name != "energy_j")
    return found


def _known(
    values: NDArray[np.floating], starts: NDArray[np.int64], *, mean: bool
) -> NDArray[np.floating]:
    known = ~np.isnan(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    times = np.add.reduceat(known.astype(np.int64), starts)
    scaled = total / np.maximum(times, 1) if mean else total
    return np.where(times > 0, scaled, np.nan)
