"""What a process records: every operation and span in a ring, sums over the whole run, steps in order.

issue ──► row of the ring ◄── ended          any thread; after `reserve`, the C core writes the row
              │ when a quarter of the ring is new, or 2 s have passed
              └──► sums                      fold
push, pop ──► time of the main thread by phase ──► step_ended ──► row of windows

All of it lies in a file that is mapped: what was written is there for readers at once, and stays when the
process is killed. Writing costs no system call.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.current import usage
from fivefold.trace.file import TraceFile, name_of
from fivefold.trace.fold import folded, merge
from fivefold.trace.schema import (
    EVENT,
    LIVE,
    NOTHING,
    PACKED,
    PHASES,
    SPAN,
    TAGS,
    WINDOW,
    ProcessState,
    offset_of,
)
from fivefold.trace.windows import Row, combined, new_row, write_row

__all__ = ["OTHER", "Trace"]

OTHER = TAGS.index("other")
_NEW = struct.Struct("<Qq32xqIIBBBBBxh")
"""an operation that has just been asked for; what is left out becomes zero, in half the time"""
_HEAD = struct.Struct("<Qq")
_ENDING = struct.Struct("<qqq")
_PHASE = struct.Struct("<IIq")
assert _NEW.size == EVENT.itemsize
_ALIVE = struct.Struct("<qQ")
_BEAT = struct.Struct("<q")
_COUNT = struct.Struct("<Q")
_END_AT = offset_of(EVENT, "end_ns")
_ALIVE_AT, _WINDOWS_AT = offset_of(LIVE, "heartbeat_ns"), offset_of(LIVE, "windows")
assert offset_of(LIVE, "step") == _ALIVE_AT + 8
_PHASE_AT = offset_of(LIVE, "phase")
_FOLD_NS = 10_000_000_000
_FRUGAL = ("loss", "metric")
"""kinds of notes that may come every step, and so do not get the last quarter of the room"""

_now = time.monotonic_ns
_thread_cpu = time.thread_time_ns


class Trace:
    """The recording of one process. Made by `Trace.create`, or by `fivefold.trace.start` for all to find.

    `issue`, `ended`, `note` may be called by every thread; `push`, `pop` and `step_ended` act for the thread
    that made the trace, which is the one that trains.
    """

    _done: Row | None = None
    """sums of the rows that are full, once somebody asked for `totals`"""

    def __init__(self, file: TraceFile, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.samplers: list[Callable[[Row], None]] = []
        """called with a row of windows when it is complete, to fill in what they know"""
        self.before_step: list[Callable[[], None]] = []
        """called when a step ends, to tell what has come to light only now"""
        self.closers: list[Callable[[], None]] = []
        """called by `close` before anything else"""
        self.after_phase: list[Callable[[int, int, int], None]] = []
        """called when a span ends: phase, begin and end in ns"""
        self.told_steps = False
        """whether a training loop of Fivefold's says where steps end"""
        self.step = 1
        """under way, counted from 1"""
        self.phase = NOTHING
        """of the training thread"""
        self.thread = threading.get_ident()
        """the training thread"""
        self._file, self._buffer = file, cast(Any, file.buffer)
        self._live: np.void = file.live[0]
        self._events: NDArray[np.void] = file.events
        self._rows = len(file.events)
        self._base = int(file.sections["events"]["offset"])
        self._address = int(file.events.ctypes.data)
        self._windows_at = int(file.sections["windows"]["offset"])
        self._live_at = int(file.sections["live"]["offset"])
        self._seq = itertools.count(1)
        self._last = 0
        self._fold_at, self._folded_ns = self._rows // 4, _now()
        self._ended = Ended(file)
        self._lock = threading.RLock()
        self._texts = threading.RLock()
        self._stack: list[list[int]] = []
        self._phase_ns, self._phase_cpu_ns = [0] * len(PHASES), [0] * len(PHASES)
        self._row, self._windows = new_row(), 0
        self._window_steps, self._begun_ns = 1, 0
        self._ready: list[int] = []
        self._groups = itertools.count()
        self._say_alive()
        self.update_meta(**meta)

    def _say_alive(self) -> None:
        live = self._live
        live["pid"], live["window_steps"], live["step"] = os.getpid(), 1, self.step
        live["heartbeat_ns"] = live["phase_since_ns"] = _now()
        live["phase"] = NOTHING

    @classmethod
    def create(
        cls, folder: Path, meta: Mapping[str, Any], rows: Mapping[str, int] | None = None
    ) -> Trace:
        """Begin the file of rank `meta["rank"]` in `folder`, which is made. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name_of(int(meta["rank"]))
        return cls(TraceFile.create(path, rows), path, meta)

    def beat(self) -> None:
        """Say that the process lives. Any thread may."""
        _BEAT.pack_into(self._buffer, self._live_at + _ALIVE_AT, _now())

    # ---- operations

    def issue(  # noqa: PLR0917 - by position, since this is the shortest way
        self, kind: int, tag: int, group: int, number: int, size_bytes: int, dtype: int, peer: int = -1
    ) -> int:  # fmt: skip
        """Note that an operation was asked for; what `ended` wants to know later."""
        seq = next(self._seq)
        _NEW.pack_into(
            self._buffer, self._base + (seq - 1) % self._rows * 72,
            seq, _now(), size_bytes, number & 0xFFFFFFFF, self.step, kind, tag, self.phase, group, dtype,
            peer,
        )  # fmt: skip
        self._last = seq
        if seq >= self._fold_at:
            self._catch_up()
        return seq

    def reserve(self) -> tuple[int, int]:
        """A row for an operation that the C core notes, as an address, and the number of the event."""
        seq = self._last = next(self._seq)
        if seq >= self._fold_at:
            self._catch_up()
        return self._address + (seq - 1) % self._rows * 72, seq

    def ended(self, event: int, blocked_ns: int = -1, start_ns: int = 0, end_ns: int = 0) -> None:
        """Note that an operation has ended, now unless `end_ns` says when.

        `blocked_ns`: how long its caller could do nothing else; -1: from asking to the end. `start_ns`: when
        all ranks had come to it, by CLOCK_MONOTONIC; 0: unknown.
        """
        at = self._base + (event - 1) % self._rows * 72
        seq, begin = _HEAD.unpack_from(self._buffer, at)
        if seq == event:
            end = end_ns or _now()
            if usage.background:
                blocked_ns = 0
            elif blocked_ns < 0:
                blocked_ns = end - begin
            _ENDING.pack_into(self._buffer, at + _END_AT, end, blocked_ns, start_ns)

    def begun_ns(self, event: int) -> int:
        """When an operation was asked for; 0 when its row was written over since."""
        seq, begin = _HEAD.unpack_from(self._buffer, self._base + (event - 1) % self._rows * 72)
        return int(begin) if seq == event else 0

    def new_group(self, name: str, ranks: list[int], backend: str, key: str) -> int:
        """Note a group; its index here, `NOTHING` from the 256th on.

        `key` is the same on all ranks of the group, its index need not be.
        """
        index = next(self._groups)
        if index >= NOTHING:
            return NOTHING
        self.note("group", index=index, name=name, ranks=ranks, backend=backend, key=key)
        return index

    # ---- phases of the training thread

    def push(self, phase: int) -> bool:
        """A phase begins; whether this thread's phases are recorded, and `pop` has to follow."""
        if threading.get_ident() != self.thread:
            return False
        now = _now()
        self._begun_ns = self._begun_ns or now
        self._stack.append([phase, now, _thread_cpu(), 0, 0])
        self._enter(phase, now)
        return True

    def pop(self) -> None:
        """The phase that began last ends."""
        phase, begin, cpu_begin, inner_ns, inner_cpu = self._stack.pop()
        now, cpu = _now(), _thread_cpu() - cpu_begin
        seq = next(self._seq)
        PACKED.pack_into(
            self._buffer, self._base + (seq - 1) % self._rows * 72,
            seq, begin, now, 0, 0, cpu, 0, 0, self.step, SPAN, OTHER, phase, NOTHING, 0, 0, -1,
        )  # fmt: skip
        self._last = seq
        self._phase_ns[phase] += now - begin - inner_ns
        self._phase_cpu_ns[phase] += cpu - inner_cpu
        outer = NOTHING
        if self._stack:
            around = self._stack[-1]
            around[3] += now - begin
            around[4] += cpu
            outer = around[0]
        self._enter(outer, now)
        for follow in self.after_phase:
            follow(phase, begin, now)
        if seq >= self._fold_at:
            self._catch_up()

    def is_here(self) -> bool:
        """Whether this is the training thread."""
        return threading.get_ident() == self.thread

    @property
    def nested(self) -> int:
        """How many phases have begun and not ended."""
        return len(self._stack)

    def _enter(self, phase: int, now: int) -> None:
        self.phase = phase
        _PHASE.pack_into(self._buffer, self._live_at + _PHASE_AT, phase, self._window_steps, now)

    # ---- steps

    def begin_at(self, step: int) -> None:
        """The step under way is number `step`, and begins now; the caller will say where it ends."""
        with self._lock:
            self.step, self.told_steps = step, True
            self._live["step"] = step
            self._begun_ns = _now()

    def ready(self, batches: int) -> None:
        """The loader had so many batches ready when the step asked for one."""
        self._ready.append(batches)

    def step_ended(self, samples: int = 0, loss: float | None = None) -> None:
        """The step under way is over: its row is complete, or added to that of its neighbours."""
        for tell in self.before_step:
            tell()
        now = _now()
        with self._lock:
            row = self._row
            if not row["steps"]:
                row["first_step"], row["begin_ns"] = self.step, self._begun_ns or now
            self._ended.collect(self._last, row)
            steps: int = row["steps"]
            if loss is not None:
                before = 0.0 if math.isnan(row["loss"]) else row["loss"] * steps
                row["loss"] = (before + loss) / (steps + 1)
            row["steps"], row["end_ns"] = steps + 1, now
            row["samples"] += samples
            self._take_phases(row)
            if self._ready:
                row["ready"] = sum(self._ready) / len(self._ready)
            full = steps + 1 >= self._window_steps
            if full:
                for sampler in self.samplers:
                    sampler(row)
            self._put(row, full=full)
            self.step += 1
            self._begun_ns = now
            _ALIVE.pack_into(self._buffer, self._live_at + _ALIVE_AT, now, self.step)
        if now - self._folded_ns > _FOLD_NS:
            self.fold()

    def _take_phases(self, row: Row) -> None:
        for name, own in (("phase_ns", self._phase_ns), ("phase_cpu_ns", self._phase_cpu_ns)):
            sums = row[name]
            for phase, spent in enumerate(own):
                sums[phase] += spent
            own[:] = [0] * len(own)

    def _put(self, row: Row, *, full: bool) -> None:
        """The row where readers find it; the next one begins once it is full."""
        windows = self._file.windows
        if self._windows == len(windows):
            self._live["stamp"] += 1
            made = combined(windows)
            windows[: len(made)] = made
            self._windows, self._window_steps = len(made), 2 * self._window_steps
            self._live["windows"], self._live["window_steps"] = len(made), self._window_steps
            self._live["stamp"] += 1
            full = row["steps"] >= self._window_steps
        self._write_row()
        if full:
            self._windows += 1
            if self._done is not None:
                _add(self._done, self._row)
            self._row = new_row()
            self._ready.clear()

    def totals(self) -> Row:
        """`phase_ns` and `tag_blocked_ns` of all steps since the first call, and of some before it."""
        with self._lock:
            if self._done is None:
                self._done = new_row()
            found = new_row()
            _add(found, self._done)
            _add(found, self._row)
            return found

    def _write_row(self) -> None:
        write_row(self._buffer, self._windows_at + self._windows * WINDOW.itemsize, self._row)
        _COUNT.pack_into(self._buffer, self._live_at + _WINDOWS_AT, self._windows + 1)

    # ---- adding up

    def _catch_up(self) -> None:
        """A quarter of the ring is new: before it is written over, add it up. One thread does."""
        if self._lock.acquire(blocking=False):
            try:
                self.fold()
            finally:
                self._lock.release()

    def fold(self) -> None:
        """Add what has ended up in the sums, and mark it. Done by itself; call it before reading at rest."""
        with self._lock:
            self._last = max(self._last, int(self._events["seq"].max()))
            self._folded_ns, self._fold_at = _now(), self._last + self._rows // 4
            self._ended.collect(self._last, self._row)
            self._ended.fold()

    # ---- texts

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line to the notes; `at_ns` is now unless it is given."""
        line = json.dumps({"kind": kind, "at_ns": _now(), **fields}, default=str).encode() + b"\n"
        section = self._file.sections["notes"]
        with self._texts:
            used, room = int(self._live["notes_bytes"]), int(section["bytes"])
            if used + len(line) > (room * 3 // 4 if kind in _FRUGAL else room):
                self._live["lost_notes"] += 1
                return
            at = int(section["offset"]) + used
            self._buffer[at : at + len(line)] = line
            self._live["notes_bytes"] = used + len(line)

    def update_meta(self, **fields: Any) -> None:
        """Set fields of meta; those that find no room are left out, longest first, and a note says so."""
        with self._texts:
            self.meta.update(fields)
            room = int(self._file.sections["meta"]["bytes"])
            told = {name: json.dumps(value, default=str) for name, value in self.meta.items()}
            while sum(len(name) + len(text) + 6 for name, text in told.items()) > room:
                longest = max(told, key=lambda name: len(told[name]))
                del told[longest]
                self.note("warning", text=f"{longest} of meta found no room")
            self.write(
                "meta", "{" + ", ".join(f"{json.dumps(n)}: {t}" for n, t in told.items()) + "}"
            )

    def write(self, section: str, text: str) -> None:
        """Replace a section of text, as far as there is room: meta, stacks."""
        told, where = text.encode(), self._file.sections[section]
        told = told[: int(where["bytes"])]
        with self._texts:
            at = int(where["offset"])
            self._buffer[at : at + len(told)] = told
            self._live[f"{section}_bytes"] = len(told)

    # ---- the end

    @property
    def live(self) -> np.void:
        """The row `live`, to be read and, by those who own a field, written."""
        return self._live

    @property
    def file(self) -> TraceFile:
        """What is being written."""
        return self._file

    def close(self, state: ProcessState = ProcessState.ENDED) -> None:
        """Add everything up and say how the process ended. Calling it again changes the state only."""
        closers, self.closers = self.closers, []
        for close in closers:
            close()
        with self._lock:
            self.fold()
            if self._row["steps"]:
                self._write_row()
            self._live["heartbeat_ns"], self._live["state"] = _now(), int(state)


def _add(to: Row, row: Row) -> None:
    for name in ("phase_ns", "tag_blocked_ns"):
        to[name] = [a + b for a, b in zip(to[name], row[name], strict=True)]


# ---- What has ended since the last look: into the row of the step under way and, now and then, the sums

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
