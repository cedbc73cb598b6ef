"""Runs of faulty_training.py, and what holds a rank from outside: signals, control groups, the network."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self

from fivefold.trace.file import TraceError
from fivefold.trace.reader import RankTrace
from namespaces import Job, call, entering
from nodes import Nodes

__all__ = ["SCRIPT", "Gate", "Quota", "notes", "paused", "quota_refusal", "run", "slow_link"]

SCRIPT = str(Path(__file__).resolve().parent / "faulty_training.py")


def run(
    nodes: Nodes, trace: Path, *options: str, ranks: int = 2, hang_s: float = 1.0,
    env: Mapping[str, str] | None = None,
) -> Job:  # fmt: skip
    """Start the run on all nodes, `ranks` on each."""
    extra = {
        "FIVEFOLD_TRACE": str(trace), "FIVEFOLD_HANG_S": str(hang_s), **(env or {})
    }  # fmt: skip
    return nodes.job([sys.executable, SCRIPT, *options], ranks_per_node=ranks, env=lambda _: extra)


def notes(trace: Path, *kinds: str) -> list[dict[str, Any]]:
    """Notes of all ranks, each with its `by`."""
    found: list[dict[str, Any]] = []
    for path in sorted(trace.glob("*.trace")):
        with contextlib.suppress(TraceError):  # it has just begun
            rank = RankTrace.load(path)
            found += [{**note, "by": rank.rank} for note in rank.notes if note["kind"] in kinds]
    return found


class Gate:
    """Holds ranks until their number is known, and again before they train."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, name: str, job: Job) -> None:
        """Let all ranks go on once all are there."""
        self.reached(name, job)
        (self.folder / name).touch()

    def reached(self, name: str, job: Job, limit_s: float = 90.0) -> None:
        """Wait until all ranks are there."""
        end = time.monotonic() + limit_s
        while not all(f"at {name}" in rank.text for rank in job.ranks):
            assert time.monotonic() < end, job.told()
            assert all(rank.code is None for rank in job.ranks), job.told()
            time.sleep(0.02)


@contextlib.contextmanager
def paused(pid: int, *, on_s: float, off_s: float) -> Generator[None]:
    """A process that runs `on_s` and stands `off_s`, in turn, as on a core that others take."""
    ending = threading.Event()

    def duty() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ending.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(off_s)
                os.kill(pid, signal.SIGCONT)
                time.sleep(on_s)

    thread = threading.Thread(target=duty)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


_PERIOD_US = 20_000


def quota_refusal() -> str:
    """Why no quota of processor time can be set here, or nothing."""
    try:
        with Quota() as quota:
            quota.limit(0.5)
    except OSError as problem:
        return f"control groups cannot be made here: {problem}"
    return ""


class Quota:
    """A control group of processors, of version 1 or 2; without a limit at first. A context manager."""

    def __enter__(self) -> Self:
        first = Path("/sys/fs/cgroup/cpu")
        self._first = first.is_dir()
        self._top = first if self._first else Path("/sys/fs/cgroup")
        self._group = self._top / f"fivefold-test-{os.getpid()}-{time.monotonic_ns()}"
        self._group.mkdir()
        return self

    def hold(self, pid: int) -> None:
        """Take a process in."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float) -> None:
        """From now on all processes within have so many cores."""
        quota = int(cores * _PERIOD_US)
        if self._first:
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + 30
        while True:
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._top / "cgroup.procs").write_text(pid)
            try:
                self._group.rmdir()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                return


def slow_link(
    nodes: Nodes,
    node: int,
    mbit_per_s: float,
    *,
    burst: str = "32kbit",
    latency: str = "400ms",
    interface: str = "eth0",
) -> None:
    """What a node sends by an interface leaves it at so many Mbit/s at most, from now on: see `tc-tbf`."""
    up = nodes._up(node)  # pyright: ignore[reportPrivateUsage]
    assert up.init is not None, "nodes that are not apart have no links"
    shape = f"rate {mbit_per_s:g}mbit burst {burst} latency {latency}"
    call(
        [
            *entering(up.init, "n"),
            "tc",
            "qdisc",
            "replace",
            "dev",
            interface,
            "root",
            "tbf",
            *shape.split(),
        ]
    )
