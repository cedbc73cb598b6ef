"""What a foreign launcher starts in the place of a rank: it starts the rank and reports on it.

    python -m fivefold.launch.shim --log-dir DIR [--fifo PATH] [--cores LIST ...] [--device UUID ...] -- words

Whatever launched it, the rank finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set. Its output is
kept in `DIR/rank-N.log` and sent along the pipe at PATH; where there is none (another node), it is shown
with a prefix, in whole lines. The shim ends as the rank ended, by the same signal if need be; after code
75 (saved, try again), which the pipe told, with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from fivefold.cluster.reading import numbers
from fivefold.launch.environment import RankPlace, locate
from fivefold.launch.guard import dies_with_parent
from fivefold.launch.job import Resumable, log_path
from fivefold.launch.output import Display, LogLines
from fivefold.launch.relay import ERR, EXIT, FRAME_BYTES, HELLO, OUT, send

__all__ = ["main"]

_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# How long to wait for the end of the output of a rank whose own children live on.
_DRAIN_S = 0.5

Report = Callable[[bytes, bytes], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    parser = argparse.ArgumentParser(prog="fivefold.launch.shim")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--fifo", type=Path)
    parser.add_argument("--cores", action="append", default=[])
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    place = locate()
    report = _reporter(place, options.fifo)
    if place.local_rank < len(options.device):
        os.environ["CUDA_VISIBLE_DEVICES"] = options.device[place.local_rank]
    with log_path(options.log_dir, place.rank).open("ab", buffering=0) as log:
        code = _run(options.command, place, _share(options.cores, place), log, report)
    report(EXIT, b"%d" % code)
    if code < 0:
        _die_of(-code)
    # A launcher ends the other ranks at once when one ends with an error: they would not save to the end.
    return 0 if code == Resumable.exit_code and options.fifo is not None else code


def _reporter(place: RankPlace, path: Path | None) -> Report:
    with contextlib.suppress(OSError):
        if path is not None:
            fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails at once if nobody reads
            os.set_blocking(fifo, True)
            return lambda kind, payload: send(fifo, place.rank, kind, payload)
    display = Display("prefix")
    lock = threading.Lock()

    def show(kind: bytes, payload: bytes) -> None:
        with lock:
            if kind == EXIT:
                display.close(place.rank)
            elif kind != HELLO:
                display.feed(place.rank, "out" if kind == OUT else "err", payload)

    return show


def _share(told: Sequence[str], place: RankPlace) -> set[int]:
    """The rank's own cores of those that it may use; none if it is not bound, or by its launcher already."""
    wanted = set(numbers(told[place.local_rank])) if place.local_rank < len(told) else set[int]()
    return wanted & os.sched_getaffinity(0)


def _run(
    command: list[str], place: RankPlace, cores: set[int], log: IO[bytes], report: Report
) -> int:
    rank = subprocess.Popen(
        command,
        env=os.environ | _ranks(place),
        stdin=None if place.rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        # MPICH talks to its ranks through an inherited descriptor (PMI_FD).
        close_fds=False,
        preexec_fn=dies_with_parent(cores=cores),  # noqa: PLW1509 - no threads yet
    )
    for signum in _FORWARDED:
        signal.signal(signum, lambda number, _: rank.send_signal(number))
    report(
        HELLO, b"%d %d %d" % (os.getpid(), os.getpgrp(), rank.pid)
    )  # from here on signals may come
    assert rank.stdout is not None and rank.stderr is not None
    readers = [
        threading.Thread(target=_pump, args=(pipe, kind, log, report), daemon=True)
        for pipe, kind in ((rank.stdout, OUT), (rank.stderr, ERR))
    ]
    for reader in readers:
        reader.start()
    code = rank.wait()
    for reader in readers:
        reader.join(_DRAIN_S)
    return code


def _ranks(place: RankPlace) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }


def _pump(pipe: IO[bytes], kind: bytes, log: IO[bytes], report: Report) -> None:
    lines = LogLines(log)
    with contextlib.suppress(OSError, ValueError):
        while chunk := pipe.read(FRAME_BYTES):
            lines.feed(chunk)
            # The launcher may be gone; the rank's output must go on being read all the same.
            with contextlib.suppress(BrokenPipeError):
                report(kind, chunk)
    lines.flush()


def _die_of(signum: int) -> None:
    """End by the signal that ended the rank, without leaving a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


if __name__ == "__main__":
    sys.exit(main())
