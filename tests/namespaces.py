"""Namespaces of the kernel as commands make and enter them, and the processes that live in them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from template import Forked

__all__ = [
    "Job",
    "NodesError",
    "Process",
    "begun",
    "call",
    "end_of",
    "entering",
    "namespace",
]

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0

# Process 1 of a node, and the hub's. It collects what other processes leave, and ends when we do.
_INIT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("ready", flush=True)
sys.stdin.read()
"""


class NodesError(Exception):
    """A node could not be made; the message ends with what the tool said."""


class Process:
    """A process on a node; what it prints goes into a file."""

    def __init__(
        self, popen: subprocess.Popen[bytes] | Forked, log: Path, *, entered: bool
    ) -> None:
        self._popen = popen
        self.log = log
        self._entered = entered  # through nsenter, whose child is meant

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Its number here, not the one on its node."""
        if not self._entered:
            return self._popen.pid
        return only_child(self._popen)

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._popen.poll()

    def send_signal(self, signum: int) -> None:
        """As `kill` on its node would."""
        os.kill(self.pid, signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """How it ended; a failed assertion with its last words if it does not."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            last = "\n".join(self.text.splitlines()[-20:])
            raise AssertionError(
                f"still running after {timeout_s:g} s; it last wrote\n{last}"
            ) from None

    def reap(self) -> None:
        """Wait for what has been killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_LIMIT_S)


@dataclass
class Job:
    """The ranks of a job."""

    ranks: list[Process]

    def wait(self, timeout_s: float = 60.0) -> list[int]:
        """How each rank ended."""
        end = time.monotonic() + timeout_s
        return [rank.wait(max(end - time.monotonic(), 0.0)) for rank in self.ranks]

    def succeed(self, timeout_s: float = 60.0) -> list[str]:
        """What the ranks printed; a failed assertion unless all end well."""
        self._settle(timeout_s)
        codes = [rank.code for rank in self.ranks]
        self.end()
        assert not any(codes) and None not in codes, f"exit codes {codes}\n{self.told()}"
        return [rank.text for rank in self.ranks]

    def fail(self, timeout_s: float = 60.0, grace_s: float = 5.0) -> None:
        """Wait until a rank has failed, leave the others a moment, and end them, as a launcher does."""
        self._settle(timeout_s, grace_s)
        assert any(rank.code for rank in self.ranks), self.told()
        self.end()

    def _settle(self, timeout_s: float, grace_s: float = 5.0) -> None:
        """Wait until all have ended, or one has failed and the others had a moment to end too."""
        end = time.monotonic() + timeout_s
        while None in (codes := [rank.code for rank in self.ranks]) and not any(codes):
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        end = time.monotonic() + grace_s
        while None in [rank.code for rank in self.ranks] and time.monotonic() < end:
            time.sleep(0.01)

    def told(self) -> str:
        """The last words of all ranks."""
        return "\n".join(
            f"--- rank {number}:\n" + "\n".join(rank.text.splitlines()[-25:])
            for number, rank in enumerate(self.ranks)
        )

    def end(self) -> None:
        """Kill what still runs, as a launcher does when a rank has failed."""
        for rank in self.ranks:
            if rank.code is None:
                with contextlib.suppress(ProcessLookupError, NodesError):
                    rank.send_signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.reap()


def begun(space: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """What holds new namespaces open, and the number of its process 1 here."""
    with tempfile.TemporaryFile(dir=folder) as said:
        process = subprocess.Popen(
            [*space, sys.executable, "-I", "-S", "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        assert process.stdout is not None
        if not _says_ready(process.stdout):
            end_of(process)
            said.seek(0)
            told = said.read().decode(errors="replace").strip()
            raise NodesError(f"`{' '.join(space[:8])} ...` is refused: {told or 'no answer'}")
    return process, only_child(process) if "--fork" in space else process.pid


def _says_ready(stream: IO[bytes]) -> bool:
    poll = select.poll()  # select() refuses descriptors from 1024 on
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(START_LIMIT_S * 1000)) and stream.readline() == b"ready\n"


def entering(pid: int, *spaces: str) -> list[str]:
    """A command's beginning: run it in the namespaces of a process."""
    flags = [f"-{space}" for space in spaces]
    return ["nsenter", "--target", str(pid), "--user", "--preserve-credentials", *flags]


def call(argv: Sequence[str], told: str = "") -> None:
    done = subprocess.run(
        argv, input=told, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    if done.returncode:
        raise NodesError(f"`{' '.join(argv[-3:])}` failed: {done.stderr.strip()}")


def only_child(parent: subprocess.Popen[bytes] | Forked) -> int:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if children := psutil.Process(parent.pid).children():
                return children[0].pid
        if parent.poll() is not None:
            raise ProcessLookupError(f"process {parent.pid} has ended")
        time.sleep(0.005)
    raise NodesError(f"process {parent.pid} started nothing within {START_LIMIT_S:g} s")


def end_of(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(END_LIMIT_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None
