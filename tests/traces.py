"""Traces of runs that never were: a step told by a few numbers, faults put in, files as ranks write them.

    begin  load  forward  backward [hidden all_reduce ...]  reduce [all_reduce]  update

All ranks begin a step together and meet in the reduction: who comes late makes the others wait.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.trace.file import TraceFile, name_of
from fivefold.trace.fold import folded
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.schema import DTYPES, EVENT, KINDS, PHASES, TAGS, WINDOW, ProcessState

__all__ = ["MS", "Story", "write"]

MS = 1_000_000
_P = {name: number for number, name in enumerate(PHASES)}
_SPANS = (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD)
_GRADIENTS = TAGS.index(Tag.GRADIENTS)


@dataclass
class Story:
    """What happens in every step of every rank. Arrays are ranks x steps (x phases), nanoseconds."""

    ranks: int = 4
    steps: int = 40
    seed: int = 0
    per_node: int = 0
    """ranks of a node; 0: all"""
    first_step: int = 0
    transfer_ns: int = 4 * MS
    """of the reduction that is not hidden"""
    hidden_ns: int = 3 * MS
    size_bytes: int = 4 << 20
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """of rank 0"""
    stacks: dict[int, dict[str, list[tuple[str, int]]]] = field(default_factory=dict)
    state: ProcessState = ProcessState.ENDED
    tiny: int = 0
    """small operations per step besides, before the large one"""
    tiny_blocked_ns: int = 0
    """that each of them takes, and is waited for"""
    host: str | None = None
    """of all ranks; None: by node, and this one where it is empty"""
    coordinates: Callable[[int], dict[str, int]] = lambda rank: {"data": rank}
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    """by rank: how far its clock is behind, ns"""
    edits: list[Callable[[int, NDArray[np.void]], NDArray[np.void]]] = field(default_factory=list)
    """what becomes of the windows of a rank before they are written"""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shape = (self.ranks, self.steps)
        self.work = np.zeros((*shape, len(PHASES)), np.int64)
        for phase, ns in ((Phase.LOAD, MS // 5), (Phase.FORWARD, 20 * MS),
                          (Phase.BACKWARD, 30 * MS), (Phase.UPDATE, 3 * MS)):  # fmt: skip
            self.work[..., _P[phase]] = ns * (1 + 0.01 * random.standard_normal(shape))
        self.cpu = self.work.copy()
        self.cpu[..., _P[Phase.LOAD]] //= 4
        self.run_delay = np.full(shape, MS // 10)
        self.throttled = np.zeros(shape, np.int64)
        self.samples = np.full(shape, 32)
        self.ready = np.full(shape, 2.0)
        self.rss = np.full(shape, 600 << 20)
        self.gpu_busy = np.full(shape, np.nan)

    # --- faults -----------------------------------------------------------------------------------

    def more(self, rank: int | slice, phase: Phase, ns: int, *, cpu: bool) -> Story:
        """A rank takes longer in a phase, computing or not."""
        self.work[rank, :, _P[phase]] += ns
        if cpu:
            self.cpu[rank, :, _P[phase]] += ns
        return self

    def slow_loader(self, rank: int | slice, ns: int = 12 * MS) -> Story:
        """Its loader is empty whenever it is asked."""
        self.ready[rank] = 0.0
        return self.more(rank, Phase.LOAD, ns, cpu=False)

    def sleeps(
        self, rank: int, ns: int = 12 * MS, where: str = "model.py:42 forward (time.sleep)"
    ) -> Story:
        """It sleeps in a layer."""
        for one in range(self.ranks):
            self.stacks[one] = {"forward": [("model.py:50 forward", 100)]}
        self.stacks[rank] = {"forward": [("model.py:50 forward", 100), (where, 60)]}
        return self.more(rank, Phase.FORWARD, ns, cpu=False)

    # --- files ------------------------------------------------------------------------------------

    def write(self, run: Path) -> Path:
        """The files of all ranks below `run`/trace; returns `run`."""
        folder = run / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        before = self.work[..., [_P[p] for p in _SPANS]].sum(2)
        last = before.max(0)
        length = (
            last
            + self.transfer_ns
            + self.tiny * self.tiny_blocked_ns
            + self.work[..., _P[Phase.UPDATE]].max(0)
        )
        begins = 10**12 + np.concatenate([[0], np.cumsum(length)[:-1]])
        for rank in range(self.ranks):
            events = self._events(rank, begins, before[rank], last)
            for name in ("begin_ns", "end_ns"):
                events[name] -= self.offsets.get(rank, 0)
            windows = self._windows(rank, begins, length, last - before[rank] + self.transfer_ns)
            for edit in self.edits:
                windows = edit(rank, windows)
            self._write(folder / name_of(rank), rank, events, windows)
        return run

    def _write(
        self, path: Path, rank: int, events: NDArray[np.void], windows: NDArray[np.void]
    ) -> None:
        sums = folded(events)
        ring = 1 << max(6, len(events).bit_length())
        file = TraceFile.create(path, {"events": ring, "windows": max(64, self.steps)})
        events["folded"] = 1
        file.events[: len(events)] = events
        file.sums[: len(sums)] = sums
        file.windows[: len(windows)] = windows
        live = file.live[0]
        live["state"], live["pid"] = int(self.state), 2**22 - 1
        live["step"], live["phase"], live["window_steps"] = self.first_step + self.steps, 255, 1
        live["sums"], live["windows"] = len(sums), len(windows)
        live["heartbeat_ns"] = windows["end_ns"][-1]
        for name, text in (
            ("meta", json.dumps(self._meta(rank, int(windows["begin_ns"][0])))),
            ("notes", "".join(json.dumps(note) + "\n" for note in self._notes(rank))),
            ("stacks", json.dumps(self.stacks.get(rank, {}))),
        ):
            data = text.encode()
            begin = file.sections[name]["offset"]
            assert len(data) <= file.sections[name]["bytes"]
            file.buffer[begin : begin + len(data)] = data  # type: ignore[index]
            live[f"{name}_bytes"] = len(data)

    def _meta(self, rank: int, began: int) -> dict[str, Any]:
        per_node = self.per_node or self.ranks
        return {
            "rank": rank, "size": self.ranks, "local_rank": rank % per_node, "local_size": per_node,
            "node": rank // per_node, "host": self._host(rank // per_node), "pid": 2**22 - 1,
            "command": ["train.py", "--fast"], "backend": "gloo", "device": "cpu", "threads": 1,
            "cores": [rank % per_node], "monotonic_ns": began, "wall_ns": 1_700_000_000 * 10**9,
            "started": "2026-01-02T03:04:05+00:00", "clock_offset_ns": self.offsets.get(rank, 0),
            "clock_error_ns": 0,
            "layout": {"data": self.ranks}, "coordinates": self.coordinates(rank),
            "versions": {"fivefold": "0.1", "torch": "2.13"}, **self.meta,
        }  # fmt: skip

    def _host(self, node: int) -> str:
        return f"node{node}" if self.host is None else self.host or socket.gethostname()

    def _notes(self, rank: int) -> list[dict[str, Any]]:
        group = {"kind": "group", "at_ns": 1, "index": 0, "name": "data", "backend": "gloo",
                 "ranks": list(range(self.ranks))}  # fmt: skip
        return [group, *(self.notes if rank == 0 else [])]

    def _events(self, rank: int, begins: NDArray[np.int64], before: NDArray[np.int64],
                last: NDArray[np.int64]) -> NDArray[np.void]:  # fmt: skip
        per_step = 6 + self.tiny
        rows = np.zeros((self.steps, per_step), EVENT)
        rows["step"] = self.first_step + np.arange(self.steps)[:, None]
        rows["peer"] = -1
        at = begins.copy()
        for column, phase in enumerate(_SPANS):
            took = self.work[rank, :, _P[phase]]
            span = rows[:, column]
            span["kind"], span["tag"], span["group"], span["phase"] = 0, 255, 255, _P[phase]
            span["begin_ns"], span["end_ns"] = at, at + took
            span["cpu_ns"] = self.cpu[rank, :, _P[phase]]
            at = at + took
        ended = begins + last + self.tiny * self.tiny_blocked_ns
        self._operation(rows[:, 3], begins + before - 20 * MS, begins + before - 20 * MS + self.hidden_ns,
                        0, Phase.BACKWARD)  # fmt: skip
        self._operation(
            rows[:, 4], begins + before, ended + self.transfer_ns, 1 + self.tiny, Phase.REDUCE
        )
        rows[:, 4]["blocked_ns"] = last - before + self.transfer_ns
        span = rows[:, 5]
        span["kind"], span["tag"], span["group"], span["phase"] = 0, 255, 255, _P[Phase.REDUCE]
        span["begin_ns"], span["end_ns"] = begins + before, ended + self.transfer_ns
        for small in range(self.tiny):
            row = rows[:, 6 + small]
            start = begins + last + self.tiny_blocked_ns * small
            self._operation(
                row, start, start + (self.tiny_blocked_ns or 500), 1 + small, Phase.FORWARD
            )
            row["size_bytes"], row["blocked_ns"] = 64, self.tiny_blocked_ns
        flat = rows.reshape(-1)
        flat["seq"] = np.arange(1, len(flat) + 1)
        return flat

    def _operation(self, row: NDArray[np.void], begin: NDArray[np.int64], end: NDArray[np.int64],
                   place: int, phase: Phase) -> None:  # fmt: skip
        per_step = 2 + self.tiny
        row["kind"], row["tag"], row["group"] = KINDS.index("all_reduce"), _GRADIENTS, 0
        row["phase"], row["dtype"] = _P[phase], DTYPES.index("float32")
        row["begin_ns"], row["end_ns"], row["size_bytes"] = begin, end, self.size_bytes
        row["number"] = per_step * np.arange(self.steps) + place

    def _windows(self, rank: int, begins: NDArray[np.int64], length: NDArray[np.int64],
                 blocked: NDArray[np.int64]) -> NDArray[np.void]:  # fmt: skip
        rows = np.zeros(self.steps, WINDOW)
        rows["first_step"], rows["steps"] = self.first_step + np.arange(self.steps), 1
        rows["begin_ns"], rows["end_ns"] = begins, begins + length
        rows["phase_ns"][:, : len(PHASES)] = self.work[rank]
        rows["phase_ns"][:, _P[Phase.REDUCE]] += blocked
        rows["phase_cpu_ns"][:, : len(PHASES)] = self.cpu[rank]
        small = self.tiny * self.tiny_blocked_ns
        rows["phase_ns"][:, _P[Phase.FORWARD]] += small
        rows["tag_ns"][:, _GRADIENTS] = blocked + self.hidden_ns + (small or 500 * self.tiny)
        rows["tag_blocked_ns"][:, _GRADIENTS] = blocked + small
        rows["tag_bytes"][:, _GRADIENTS] = 2 * self.size_bytes
        rows["samples"], rows["loss"] = self.samples[rank], 1 / (1 + np.arange(self.steps))
        rows["cpu_ns"] = self.cpu[rank].sum(1)
        rows["run_delay_ns"], rows["throttled_ns"] = self.run_delay[rank], self.throttled[rank]
        rows["rss_bytes"], rows["gpu_bytes"] = self.rss[rank], -1
        rows["gpu_busy"], rows["ready"] = self.gpu_busy[rank], self.ready[rank]
        rows["sent_bytes"] = rows["received_bytes"] = -1
        rows["energy_j"] = np.nan
        return rows


def write(run: Path, **told: Any) -> Path:
    """The files of an unremarkable run."""
    return Story(**told).write(run)
