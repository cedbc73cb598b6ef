"""Rows of steps: filled one by one, and two made one when there is no room for more."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.schema import WINDOW

__all__ = ["UNKNOWN", "Row", "combined", "new_row", "write_row"]

Row = dict[str, Any]
"""a row that is being filled: fields by name, lists where a field has several values. No numpy: between two
steps its code is not in the processor's caches any more, and takes ten times as long as in a loop"""

_SUMMED = (
    "steps", "phase_ns", "phase_cpu_ns", "tag_ns", "tag_blocked_ns", "tag_bytes", "samples", "cpu_ns",
    "run_delay_ns", "throttled_ns", "switched", "faults",
)  # fmt: skip
_SUMMED_IF_KNOWN = ("sent_bytes", "received_bytes")
_HIGHEST = ("rss_bytes", "gpu_bytes")
_MEAN = ("loss", "gpu_busy", "ready")
UNKNOWN = dict.fromkeys((*_SUMMED_IF_KNOWN, *_HIGHEST), -1) | {
    name: float("nan") for name in (*_MEAN, "energy_j")
}
"""what fields hold that nobody has filled"""


_FIELDS = [(name, WINDOW[name].base.str, WINDOW[name].shape) for name in WINDOW.names or ()]
_CODES = {"<u4": "I", "<i8": "q", "<u8": "Q", "<f4": "f", "<f8": "d"}
_LAYOUT = struct.Struct(
    "<" + "".join(f"{shape[0] if shape else 1}{_CODES[kind]}" for _, kind, shape in _FIELDS)
)
assert _LAYOUT.size == WINDOW.itemsize


def new_row() -> Row:
    """A row of no step."""
    return {name: [0] * shape[0] if shape else UNKNOWN.get(name, 0) for name, _, shape in _FIELDS}


def write_row(buffer: Any, at: int, row: Row) -> None:
    """A row as it stands in `windows`, from byte `at` on."""
    values: list[Any] = []
    for value in row.values():
        if isinstance(value, list):
            values += value
        else:
            values.append(value)
    _LAYOUT.pack_into(buffer, at, *values)


def combined(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Neighbours made one: rows 0 and 1, 2 and 3, ...; one that is left over stays."""
    made = rows[::2].copy()
    first, second = made[: len(rows) // 2], rows[1::2]
    before = {name: first[name].copy() for name in (*_MEAN, "steps")}
    first["end_ns"] = second["end_ns"]
    for name in _SUMMED:
        first[name] += second[name]
    for name in _HIGHEST:
        first[name] = np.maximum(first[name], second[name])
    for name in _SUMMED_IF_KNOWN:
        known = (first[name] >= 0) & (second[name] >= 0)
        first[name] = np.where(known, first[name] + second[name], -1)
    first["energy_j"] = first["energy_j"] + second["energy_j"]
    for name in _MEAN:
        first[name] = _mean(before[name], before["steps"], second[name], second["steps"])
    return made


def _mean(
    one: NDArray[np.floating], one_steps: NDArray[np.integer],
    other: NDArray[np.floating], other_steps: NDArray[np.integer],
) -> NDArray[np.floating]:  # fmt: skip
    """Of the known ones, weighted by steps; nan where neither is known."""
    weights = np.where(np.isnan(one), 0, one_steps), np.where(np.isnan(other), 0, other_steps)
    total = np.maximum(weights[0] + weights[1], 1e-300)
    mean = (np.nan_to_num(one) * weights[0] + np.nan_to_num(other) * weights[1]) / total
    return np.where(np.isnan(one) & np.isnan(other), np.nan, mean)
