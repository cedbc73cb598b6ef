"""Starting again in one process: what signals do between starts."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from fivefold.errors import LaunchError
from fivefold.launch.job import Job
from fivefold.launch.restarts import restarting


class Terminal(io.RawIOBase):
    """A signal comes while its first line is written."""

    def __init__(self) -> None:
        self.shown = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        if not self.shown:
            os.kill(os.getpid(), signal.SIGUSR1)
        self.shown += bytes(data)
        return len(data)


def test_a_signal_while_a_restart_is_told_of_ends_the_job(tmp_path: Path) -> None:
    raw, starts = Terminal(), list[Job]()
    stream = io.BufferedWriter(raw)

    def start(job: Job) -> None:
        starts.append(job)
        raise LaunchError("rank 0 exited with code 3")

    def note(text: str) -> None:
        stream.write(f"{text}\n".encode())
        stream.flush()

    with pytest.raises(LaunchError, match="exited with code 3"):
        restarting(Job(["true"], 1, tmp_path, restarts=9), start, note=note)
    assert len(starts) == 1
    assert raw.shown.decode() == (
        "warning: rank 0 exited with code 3\nrestart 1 of 9 now\n"
        "note: a signal asks for an end, and nothing starts again\n"
    )
