r"""Running a job through somebody else's launcher, with output and exits still arriving one by one.

    fivefold run --- mpirun --- shim --- rank 0          mpirun may cut and mix the output of ranks, and
        ^              \------ shim --- rank 1          its exit code does not tell who failed and how.
        |                        |                       So each shim sends that along a named pipe,
        +--------- fifo ---------+                       in frames that are written whole (PIPE_BUF).

A frame is a header (rank, kind, length) and its payload. What mpirun itself says goes to `engine.log`.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fivefold.cluster.reading import spans
from fivefold.errors import LaunchError, UsageError
from fivefold.launch.attend import attend
from fivefold.launch.binding import bound, instances
from fivefold.launch.guard import dies_with_parent
from fivefold.launch.helpers import narrowed
from fivefold.launch.job import Job, ProcessStart, ended, opened_log, tail
from fivefold.launch.sharing import own_slices
from fivefold.launch.watch import Watch

__all__ = ["FRAME_BYTES", "run_through", "send", "shim_command"]

_HEADER = struct.Struct("!IcH")
FRAME_BYTES = 4096 - _HEADER.size
"""The longest payload: Linux writes up to 4096 bytes to a pipe in one piece."""

# Kinds: output, errors, hello (payload: process, its group, the rank), exit (payload: code, or minus
# the signal).
OUT, ERR, HELLO, EXIT = b"o", b"e", b"h", b"x"


def send(fifo: int, rank: int, kind: bytes, payload: bytes) -> None:
    """Write one frame."""
    assert len(payload) <= FRAME_BYTES
    os.write(fifo, _HEADER.pack(rank, kind, len(payload)) + payload)


def shim_command(job: Job, fifo: Path | None = None) -> list[str]:
    """The command that a foreign launcher starts in every process instead of the job's own."""
    report = ["--fifo", str(fifo)] if fifo is not None else []
    granted = sorted(os.sched_getaffinity(0))
    shares = [
        spans(cores)
        for cores in bound(granted, job.processes, per_device=instances(job.environment))
    ]
    own = [word for share in shares if share for word in ("--cores", share)]
    for told in own_slices({**os.environ, **job.environment}, job.processes):
        own += [word for uuid in told.values() for word in ("--device", uuid)]
    shim = ["-m", "fivefold.launch.shim", "--log-dir", str(job.log_dir), *report, *own, "--"]
    return [sys.executable, *shim, *job.command]


def run_through(job: Job, engine: str, name: str, start: Callable[[Path], ProcessStart]) -> None:
    """Run what `start` makes of the path of the pipe, and supervise it as `Watch` does.

    `name` is what people call the engine's launcher.
    """
    job.prepare_logs()
    engine_log = job.log_dir / "engine.log"
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-") as folder,
        narrowed(job.helpers),
        Watch(job) as watch,
    ):
        attend(job, engine, watch)
        fifo = Path(folder) / "frames"
        os.mkfifo(fifo, 0o600)
        frames = _Frames(job, watch)
        # Open for writing too: then the pipe never ends while shims come and go.
        watch.read(os.fdopen(os.open(fifo, os.O_RDWR), "rb", buffering=0), frames.take)
        codes: list[int] = []
        log = watch.keep(opened_log(engine_log))
        process = _start(start(fifo), log.fileno())
        watch.start(process, codes.append)
        watch.wait()
    if codes[0] or frames.greeted < job.processes:
        said = "\n".join(f"    {line}" for line in tail(engine_log)) or "    (nothing)"
        raise LaunchError(
            f"{name} {ended(codes[0])} with {frames.greeted} of {job.processes} ranks started\n"
            f"  last lines of {engine_log}:\n{said}"
        )


def _start(start: ProcessStart, log: int) -> subprocess.Popen[bytes]:
    # mpirun reads its input at once, on behalf of rank 0: a terminal is not its to read from.
    quiet = sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()
    try:
        return subprocess.Popen(
            list(start.command),
            env=dict(start.environment),
            stdin=subprocess.DEVNULL if quiet else None,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),  # noqa: PLW1509 - no threads here
        )
    except OSError as problem:
        raise UsageError(f"cannot start {start.command[0]}: {problem.strerror}") from None


class _Frames:
    """Takes the stream of frames apart."""

    def __init__(self, job: Job, watch: Watch) -> None:
        self._job = job
        self._watch = watch
        self._rest = b""
        self.greeted = 0

    def take(self, chunk: bytes) -> None:
        data = self._rest + chunk
        while len(data) >= _HEADER.size:
            rank, kind, length = _HEADER.unpack_from(data)
            end = _HEADER.size + length
            if len(data) < end:
                break
            self._handle(rank, kind, data[_HEADER.size : end])
            data = data[end:]
        self._rest = data

    def _handle(self, rank: int, kind: bytes, payload: bytes) -> None:
        if kind == HELLO:
            self.greeted += 1
            pid, group, own = map(int, payload.split())
            self._watch.add_group(group)
            self._watch.add_shim(rank, pid)
            self._watch.add_rank(rank, own)
        elif kind == EXIT:
            self._watch.ended(rank, int(payload))
        else:
            self._watch.display.feed(rank, "out" if kind == OUT else "err", payload)
