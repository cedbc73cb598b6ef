r"""The latest events as a trace for https://ui.perfetto.dev or chrome://tracing.

    process "rank 0"   phases      |  load  |    forward    |    backward     |update|
                       gradients                     |  all_reduce 1   | all_reduce 2 |
    process "rank 1"   phases      |  load  |   forward   |       backward    |update|
                       gradients                   \---> |  all_reduce 1 | ...

A process per rank, a thread for its phases and one per tag, a second where operations overlap. Arrows
connect the parts of one collective in the order in which ranks came. Format: Trace Event Format (Google),
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.exports.clock import begin_ns, offset_ns
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import DTYPES, KINDS, NOTHING, PHASES, TAGS
from fivefold.writing import opened_anew

__all__ = ["EVENTS", "write_perfetto"]

EVENTS = 1_000_000
"""written at most: Perfetto's page takes about this many; older ones are left out"""
_PHASES_THREAD = 1
_LANES = 16
"""threads a tag may take; what overlaps more is drawn in the last"""


def write_perfetto(traces: Sequence[RankTrace], out: Path, limit: int = EVENTS) -> str:
    """Write the file `out`, or `out`/trace.json if that is a folder."""
    path = out / "trace.json" if out.is_dir() or not out.suffix else out
    path.parent.mkdir(parents=True, exist_ok=True)
    zero_ns = begin_ns(traces)
    since_ns, left_out = _latest(traces, limit)
    parts = [_Rank(trace, zero_ns, since_ns) for trace in traces]
    with opened_anew(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        first = True
        for event in _all(parts):
            file.write(("" if first else ",\n") + json.dumps(event))
            first = False
        file.write("\n]}\n")
    told = f"; {left_out:,} older events are left out" if left_out else ""
    return f"wrote {path}: open it at https://ui.perfetto.dev{told}"


def _latest(traces: Sequence[RankTrace], limit: int) -> tuple[int, int]:
    """From when on events are written, and how many are not: the same moment for all ranks."""
    times = np.concatenate([t.events["begin_ns"] + offset_ns(t) for t in traces])
    if len(times) <= limit:
        return np.iinfo(np.int64).min, 0
    since = int(np.sort(times)[-limit])
    return since, int((times < since).sum())


def _all(parts: Sequence[_Rank]) -> Iterator[dict[str, Any]]:
    arrivals: dict[tuple[Any, ...], list[tuple[float, int, int]]] = {}
    for part in parts:
        yield from part.events(arrivals)
        yield from part.names()
        yield from part.counters()
        yield from part.notes()
    for number, (key, found) in enumerate(arrivals.items(), start=1):
        yield from _arrows(number, key, sorted(found))


def _arrows(
    number: int, key: tuple[Any, ...], found: Sequence[tuple[float, int, int]]
) -> Iterator[dict[str, Any]]:
    """From who came first to who came last."""
    if len(found) < 2:
        return
    for i, (at_us, rank, thread) in enumerate(found):
        end = i == len(found) - 1
        yield {
            "ph": "s" if i == 0 else "f" if end else "t", "id": number, "cat": "collective",
            "name": str(key[-1]), "ts": at_us, "pid": rank, "tid": thread,
            **({"bp": "e"} if end else {}),
        }  # fmt: skip


@dataclass
class _Rank:
    """What one rank adds to the file."""

    trace: RankTrace
    zero_ns: int
    since_ns: int
    threads: dict[int, str] = field(default_factory=lambda: {_PHASES_THREAD: "phases"})
    ends: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def us(self, time_ns: int) -> float:
        return (time_ns + offset_ns(self.trace) - self.zero_ns) / 1e3

    def events(
        self, arrivals: dict[tuple[Any, ...], list[tuple[float, int, int]]]
    ) -> Iterator[dict[str, Any]]:
        rows = self.trace.events
        rows = rows[rows["begin_ns"] + offset_ns(self.trace) >= self.since_ns]
        latest = self._latest_ns(rows)
        groups = self._groups()
        for row in rows:
            end = int(row["end_ns"]) or latest
            thread = self._thread(row, end)
            kind = _word(KINDS, row["kind"])
            at_us = self.us(int(row["begin_ns"]))
            yield {
                "ph": "X", "pid": self.trace.rank, "tid": thread, "ts": at_us,
                "dur": max(end - int(row["begin_ns"]), 0) / 1e3,
                "name": _word(PHASES, row["phase"]) if kind == "span" else kind,
                "cat": "phase" if kind == "span" else _word(TAGS, row["tag"]),
                "args": self._arguments(row, kind),
            }  # fmt: skip
            if kind not in ("span", "send", "receive"):
                members = groups.get(int(row["group"]), int(row["group"]))
                key = (members, int(row["number"]), kind)
                arrivals.setdefault(key, []).append((at_us, self.trace.rank, thread))

    def _latest_ns(self, rows: NDArray[np.void]) -> int:
        live = int(self.trace.live["heartbeat_ns"])
        return max(live, int(rows["begin_ns"].max()), int(rows["end_ns"].max())) if len(rows) else 0

    def _thread(self, row: np.void, end_ns: int) -> int:
        """Which thread an event is drawn in: operations that overlap must not share one."""
        if row["kind"] == 0:
            return _PHASES_THREAD
        tag = int(row["tag"])
        ends = self.ends.setdefault(tag, [])
        begin = int(row["begin_ns"])
        lane = next((i for i, end in enumerate(ends) if end <= begin), len(ends))
        lane = min(lane, _LANES - 1)
        ends[lane : lane + 1] = [end_ns]
        thread = 10 + tag % 100 * _LANES + lane
        name = _word(TAGS, row["tag"])
        self.threads[thread] = f"{name} {lane + 1}" if lane else name
        return thread

    def _arguments(self, row: np.void, kind: str) -> dict[str, Any]:
        told: dict[str, Any] = {"step": int(row["step"])}
        if not int(row["end_ns"]):
            told["under way"] = True
        if kind == "span":
            return told | {"cpu_ms": int(row["cpu_ns"]) / 1e6}
        return told | {
            "bytes": int(row["size_bytes"]), "dtype": _word(DTYPES, row["dtype"]),
            "group": int(row["group"]), "number": int(row["number"]),
            "blocked_ms": int(row["blocked_ns"]) / 1e6,
            **({"peer": int(row["peer"])} if row["peer"] >= 0 else {}),
        }  # fmt: skip

    def _groups(self) -> dict[int, tuple[int, ...]]:
        """Members of each group: ranks may number the same group differently."""
        return {
            int(note["index"]): tuple(int(rank) for rank in note.get("ranks", ()))
            for note in self.trace.notes
            if note["kind"] == "group" and "index" in note and note.get("ranks")
        }

    def names(self) -> Iterator[dict[str, Any]]:
        rank = self.trace.rank
        host = self.trace.meta.get("host")
        yield _named("process_name", rank, 0, name=f"rank {rank}" + (f" ({host})" if host else ""))
        yield _named("process_sort_index", rank, 0, sort_index=rank)
        for thread, name in sorted(self.threads.items()):
            yield _named("thread_name", rank, thread, name=name)
            yield _named("thread_sort_index", rank, thread, sort_index=thread)

    def counters(self) -> Iterator[dict[str, Any]]:
        for row in self.trace.windows:
            if int(row["end_ns"]) + offset_ns(self.trace) < self.since_ns:
                continue
            values = {"memory_bytes": float(row["rss_bytes"]), "loss": float(row["loss"])}
            for name, value in values.items():
                if np.isfinite(value) and not (name == "memory_bytes" and value < 0):
                    yield {
                        "ph": "C", "pid": self.trace.rank, "ts": self.us(int(row["end_ns"])),
                        "name": name, "args": {name: value},
                    }  # fmt: skip

    def notes(self) -> Iterator[dict[str, Any]]:
        for note in self.trace.notes:
            at_ns = int(note.get("at_ns", 0))
            if note["kind"] not in ("loss", "metric", "group") and at_ns:
                yield {
                    "ph": "i", "s": "p", "pid": self.trace.rank, "tid": _PHASES_THREAD,
                    "ts": self.us(at_ns), "name": str(note["kind"]), "args": note,
                }  # fmt: skip


def _named(what: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": arguments}


def _word(names: Sequence[str], number: Any) -> str:
    index = int(number)
    return names[index] if index < len(names) else "other" if index != NOTHING else "none"
