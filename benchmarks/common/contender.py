"""The contenders' processes: all exist at once, one computes while the others are blocked.

A contender ends when its socket closes, which the kernel does even if this process is killed. What does
not end by itself is terminated, then killed; every wait has a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

import psutil

START_LIMIT_S = 300.0
BLOCK_LIMIT_S = 300.0
STOP_LIMIT_S = 5.0


class BenchmarkError(Exception):
    """A contender failed; the message ends with what it wrote last."""


@dataclass(frozen=True)
class Kind:
    """How a contender is started, and what it is called."""

    name: str
    title: str
    launcher: Sequence[str]
    """what stands before the script; {logs} is a folder"""
    ranks: int
    threads: int
    """per rank"""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    way: str = ""
    """what the worker is told to do; empty: the name"""
    python: str = sys.executable


@contextlib.contextmanager
def leave_properly() -> Generator[None]:
    """Signals that end this process leave every `with` on the way; failures are told in a few lines."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _leave)
    try:
        yield
    except BenchmarkError as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


class Contender:
    """The running processes of one kind. A context manager that leaves none behind."""

    def __init__(self, kind: Kind, worker: Path, options: Sequence[str], folder: Path) -> None:
        self.kind = kind
        self.greeting: dict[str, Any] = {}
        self._log = folder / f"{kind.name}.log"
        self._wires: list[tuple[socket.socket, IO[str]]] = []
        self._family: list[psutil.Process] = []
        address = str(folder / f"{kind.name}.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(kind.ranks)
        launcher = [word.format(logs=folder / f"{kind.name}-logs") for word in kind.launcher]
        script = [str(worker), kind.way or kind.name, "--socket", address, *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [kind.python, *launcher, *script],
                env={**os.environ, **kind.environ, "OMP_NUM_THREADS": str(kind.threads)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._remember_family()
        for wire, told in self._wires:
            with contextlib.suppress(OSError):
                told.close()
            wire.close()
        self._listener.close()
        stages = [lambda: None, self._process.terminate, self._process.kill]
        for stop in stages if error is None else stages[1:]:
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
                break
        _, alive = psutil.wait_procs(self._family, STOP_LIMIT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Return when every rank has built its model, warmed up and is waiting."""
        limit = time.monotonic() + START_LIMIT_S
        self._listener.settimeout(0.2)
        while len(self._wires) < self.kind.ranks:
            with contextlib.suppress(TimeoutError):
                wire, _ = self._listener.accept()
                wire.settimeout(BLOCK_LIMIT_S)
                self._wires.append((wire, wire.makefile("rw", encoding="utf-8")))
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            if time.monotonic() > limit:
                raise self._failed(f"was not ready within {START_LIMIT_S:g} s")
        self.greeting = self._answers()[0]
        self._remember_family()

    def block(self, steps: int) -> list[float]:
        """Run a block on all ranks, and wait for all; seconds of each step on rank 0."""
        return self.ask(steps)[0]["step_s"]

    def ask(self, number: int) -> list[dict[str, Any]]:
        """Send a number to all ranks, and wait for all; their answers in rank order."""
        for _, told in self._wires:
            with contextlib.suppress(OSError):
                print(number, file=told, flush=True)
        return self._answers()

    def used_s(self) -> float:
        """Processor time of all its processes so far, in seconds."""
        total = 0.0
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):  # `block` will tell
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _answers(self) -> list[dict[str, Any]]:
        """What the ranks said, in their order, when all have answered."""
        answers: list[dict[str, Any]] = []
        for _, told in self._wires:
            try:
                line = told.readline()
            except (TimeoutError, OSError) as problem:
                raise self._failed(f"gave no answer within {BLOCK_LIMIT_S:g} s") from problem
            if not line:
                raise self._failed("ended")
            answers.append(json.loads(line))
        if "rank" in answers[0]:
            order = sorted(range(len(answers)), key=lambda i: answers[i]["rank"])
            self._wires = [self._wires[i] for i in order]
            answers = [answers[i] for i in order]
        return answers

    def _failed(self, what: str) -> BenchmarkError:
        last = self._log.read_text(errors="replace").splitlines()[-20:]
        said = "\n".join(f"    {line}" for line in last) or "    (nothing)"
        return BenchmarkError(f"{self.kind.title}: {what}; it last wrote\n{said}")

    def _remember_family(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            self._family = [launcher, *launcher.children(recursive=True)]
