"""Ranks as processes that stay: they run one case after the other, each in a group of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fuzz.cases import Case, ranks_of

__all__ = ["Ended", "Ranks"]

TESTS = str(Path(__file__).resolve().parents[1])
LIMIT_S, GRACE_S, GONE_S, START_S = 20.0, 4.0, 3.0, 240.0
_context = multiprocessing.get_context("forkserver")


@dataclass
class Ended:
    """How a rank ended that told nothing: "crash" with a signal or code, or "hang"."""

    how: str
    text: str


def _serve(line: Connection, rank: int, stacks: str) -> None:
    import gc

    import torch.distributed as dist

    import fivefold.comm
    from fuzz import worker

    assert fivefold.comm.BACKEND
    torch.set_num_threads(1)
    told_stacks = Path(stacks).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, told_stacks, all_threads=False)
    for stream in (1, 2):  # what nets and torch print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    line.send("ready")
    while True:
        try:
            case, fault, size, path = line.recv()
        except EOFError:
            return
        dist.init_process_group(
            case["backend"],
            store=dist.FileStore(path, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=4 * LIMIT_S),
        )
        told = worker.run(case, fault)
        stream = io.BytesIO()
        torch.save(told, stream)
        line.send_bytes(stream.getvalue())
        time.sleep(0.01)  # gloo's threads give back their tensors
        dist.destroy_process_group()
        del told
        gc.collect()


class Ranks:
    """As many processes as cases need; all of them are replaced after a crash or a hang, or many cases.

    `warm` are modules to import once, in the process that they are forked from.
    """

    def __init__(
        self, limit_s: float = LIMIT_S, cases: int = 150, warm: Sequence[str] = ()
    ) -> None:
        self.limit_s = limit_s
        self._most, self._count, self._groups = cases, 0, 0
        self._processes: list[Any] = []
        self._lines: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._path = os.environ.get("PYTHONPATH")
        folders = [TESTS, *filter(None, (self._path or "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
        _context.set_forkserver_preload(["fuzz.warm", *warm])

    def _grow(self, size: int) -> None:
        started: list[Connection] = []
        for rank in range(len(self._processes), size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(there, rank, self._stacks(rank)), daemon=True
            )
            process.start()
            there.close()
            self._lines.append(here)
            self._processes.append(process)
            started.append(here)
        for line in started:  # importing torch counts as no case's time
            if not line.poll(START_S) or line.recv() != "ready":
                raise RuntimeError(f"a rank did not start within {START_S:.0f} s")

    def _stacks(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stacks-{rank}")

    def _where(self, rank: int) -> str:
        """What a rank that hangs is doing: the innermost calls of ours and of the net."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        lines = Path(self._stacks(rank)).read_text().splitlines()
        calls = re.findall(r'([^/"]+)", line (\d+) in (\w+)', "\n".join(lines[1:9]))
        return ", called by ".join(f"{name} ({file}:{line})" for file, line, name in calls)

    def run(self, case: Case, fault: str = "") -> list[dict[str, Any] | Ended]:
        """What every rank of the case tells, by rank."""
        size = ranks_of(case)
        if self._count >= self._most:
            self.stop()
        self._count += 1
        self._grow(size)
        self._groups += 1
        path = Path(self._folder.name) / f"store-{self._groups}"
        for line in self._lines[:size]:
            with contextlib.suppress(BrokenPipeError):  # one that has died is seen when it is asked
                line.send((case, fault, size, str(path)))
        compiles = case["plan"].get("parallel.compile", False)
        found = self._collected(size, self.limit_s * (4 if compiles else 1))
        if any(isinstance(told, Ended) or told["ended"] == "raised" for told in found):
            self.stop()  # nobody knows what an exception has left behind
        if case["plan"].get("memory.shard", "none") != "none":
            self.stop()  # DTensor's caches would ask for the groups of this case
        path.unlink(missing_ok=True)
        return found

    def _collected(self, size: int, limit_s: float) -> list[dict[str, Any] | Ended]:
        found: list[Any] = [None] * size
        until, gone = time.monotonic() + limit_s, float("inf")
        open_lines = {self._lines[rank]: rank for rank in range(size)}
        while open_lines and (now := time.monotonic()) < until:
            for line in wait(list(open_lines), min(until - now, 1.0)):
                rank = open_lines.pop(line)  # type: ignore[index]
                found[rank] = self._received(rank)
                if isinstance(found[rank], Ended) or found[rank]["ended"] != "done":
                    # The others follow, or wait for it; some may only just have been started.
                    until = min(until, time.monotonic() + max(GRACE_S, limit_s / 2))
                    gone = min(gone, time.monotonic() + GONE_S)
            if open_lines and time.monotonic() > gone:
                self._end(rank for rank in range(size) if found[rank] is not None)
        for rank in open_lines.values():
            found[rank] = Ended("hang", self._where(rank))
        return found

    def _end(self, ranks: Iterable[int]) -> None:
        """End processes that have told all, as a launcher finds them; who waits for them hears of it."""
        for rank in ranks:
            self._processes[rank].kill()
        self._count = self._most  # all are replaced before the next case

    def _received(self, rank: int) -> Any:
        try:
            return torch.load(io.BytesIO(self._lines[rank].recv_bytes()), weights_only=True)
        except EOFError:
            self._processes[rank].join(2)
            return Ended("crash", f"exit code {self._processes[rank].exitcode}")

    def stop(self) -> None:
        """End all processes; the next case starts others."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
            process.close()
        self._lines, self._processes, self._count = [], [], 0

    def close(self) -> None:
        """End for good."""
        self.stop()
        self._folder.cleanup()
        if self._path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._path
