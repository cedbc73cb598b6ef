"""What has ended since the last look: into the row of the step under way and, now and then, the sums."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.file import TraceFile
from fivefold.trace.fold import folded, merge
from fivefold.trace.schema import EVENT, SPAN, TAGS
from fivefold.trace.windows import Row

__all__ = ["Ended"]

_TIMES = struct.Struct("<Qqqq16xq8xBB6x")
"""of a row: seq, begin_ns, end_ns, blocked_ns, size_bytes, kind, tag"""
assert _TIMES.size == EVENT.itemsize
_FEW = 256
"""events that are looked at one by one; numpy, which is not in the caches between steps, takes longer"""


class Ended:
    """The ring of a trace's file as its owner adds it up. Calls are made with the trace's lock."""

    def __init__(self, file: TraceFile) -> None:
        self._file, self._buffer = file, cast(Any, file.buffer)
        self._live: np.void = file.live[0]
        self._events: NDArray[np.void] = file.events
        self._rows = len(file.events)
        self._base = int(file.sections["events"]["offset"])
        self._seen = 0
        self._open: list[int] = []
        self._fresh = bytearray()
        """rows that have ended, and are not yet in the sums"""

    def collect(self, last: int, row: Row) -> None:
        """Add operations up to number `last` that have ended since the last time to the row of a step.

        Here, once, it is decided whether an operation is counted, is still under way, or was written over.
        """
        first = self._seen
        last = max(first, last)  # threads may have noted theirs in another order
        if last - first > self._rows:
            self._live["lost_events"] += last - first - self._rows
            first = last - self._rows
        self._seen = last
        wanted = [*self._open, *range(first + 1, last + 1)]
        if len(wanted) > _FEW:
            self._collect_many(np.array(wanted), row)
        else:
            self._collect_few(wanted, row)

    def _collect_few(self, wanted: list[int], row: Row) -> None:
        self._open = []
        buffer, base, rows, unpack = self._buffer, self._base, self._rows, _TIMES.unpack
        took, blocked, moved = row["tag_ns"], row["tag_blocked_ns"], row["tag_bytes"]
        for seq in wanted:
            at = base + (seq - 1) % rows * 72
            raw = buffer[at : at + 72]  # once: it may be written over
            found, begin, end, stood, size, kind, tag = unpack(raw)
            if found == seq and end > 0:
                self._fresh += raw
                if kind != SPAN and tag < len(TAGS):
                    took[tag] += end - begin
                    blocked[tag] += stood
                    moved[tag] += size
            elif found <= seq:  # under way, or a thread is about to write it
                self._open.append(seq)
            else:
                self._live["lost_events"] += 1

    def _collect_many(self, wanted: NDArray[np.int64], row: Row) -> None:
        rows = self._events[(wanted - 1) % self._rows]
        there = rows["seq"] == wanted
        done = there & (rows["end_ns"] > 0)
        ended = rows[done]
        self._open = wanted[(there & ~done) | (rows["seq"] < wanted)].tolist()
        self._live["lost_events"] += int(np.count_nonzero(rows["seq"] > wanted))
        self._fresh += ended.tobytes()
        ops = ended[ended["kind"] != SPAN]
        for name, values in (
            ("tag_ns", ops["end_ns"] - ops["begin_ns"]),
            ("tag_blocked_ns", ops["blocked_ns"]),
            ("tag_bytes", ops["size_bytes"]),
        ):
            room = len(row[name])
            more = np.bincount(ops["tag"], values, room)[:room].astype(np.int64).tolist()
            row[name] = [a + b for a, b in zip(row[name], more, strict=True)]

    def fold(self) -> None:
        """Add what was collected to the sums, and mark it in the ring."""
        if not self._fresh:
            return
        rows = np.frombuffer(bytes(self._fresh), EVENT)
        self._fresh.clear()
        where = ((rows["seq"] - 1) % self._rows).astype(np.int64)
        self._live["stamp"] += 1
        used, lost = merge(self._file.sums, int(self._live["sums"]), folded(rows))
        self._live["sums"] = used
        self._live["lost_sums"] += lost
        self._events["folded"][where[self._events["seq"][where] == rows["seq"]]] = 1
        self._live["stamp"] += 1
