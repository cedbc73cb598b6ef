"""The local engine: all ranks on this node, started and supervised by Fivefold itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from fivefold.errors import UsageError
from fivefold.launch.attend import attend
from fivefold.launch.binding import bound, instances
from fivefold.launch.checkpoint_agents import SUPERVISOR, CheckpointAgents
from fivefold.launch.guard import dies_with_parent
from fivefold.launch.helpers import narrowed
from fivefold.launch.job import Job, Outcome, ProcessStart, log_path, opened_log
from fivefold.launch.output import LogLines, Stream
from fivefold.launch.port import reserved_port
from fivefold.launch.restarts import restarting
from fivefold.launch.sharing import own_slices, sharing
from fivefold.launch.supervisor import STOPPING
from fivefold.launch.variables import read_seconds
from fivefold.launch.watch import Watch

__all__ = ["LocalEngine"]


class LocalEngine:
    """Starts each rank in a session of its own, so that Ctrl-C reaches the launcher alone."""

    name = "local"

    def unavailable(self) -> str | None:
        """None: this engine needs nothing but Linux."""
        return None if sys.platform == "linux" else "it needs Linux"

    def starts(self, job: Job, port: int) -> list[ProcessStart]:
        """One process per rank; see `Engine.starts`."""
        shared = job.rank_environment(self.name) | {
            "WORLD_SIZE": str(job.processes),
            "LOCAL_WORLD_SIZE": str(job.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        shares = bound(
            sorted(os.sched_getaffinity(0)), job.processes, per_device=instances(job.environment)
        )
        slices = own_slices(shared, job.processes)
        return [
            ProcessStart(
                job.command,
                shared | slices[rank] | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                shares[rank],
            )
            for rank in range(job.processes)
        ]

    def run(self, job: Job) -> Outcome:
        """Run `job`; see `Engine.run`."""
        began = time.monotonic()
        with CheckpointAgents() as agents:
            told = {**job.environment, SUPERVISOR: agents.address}
            try:
                restarting(replace(job, environment=told), partial(self._start, agents))
            finally:
                limit_s = read_seconds("FIVEFOLD_GRACE_S", 5.0)
                if job.ending is not None:
                    limit_s = min(limit_s, job.ending.left_s)
                with _unasked():
                    for line in agents.flush(limit_s):
                        sys.stderr.write(f"note: {line}\n")
        return Outcome(job.processes, time.monotonic() - began)

    def _start(self, agents: CheckpointAgents, job: Job) -> None:
        agents.end()
        with (
            reserved_port(job.port) as port,
            narrowed(job.helpers),
            sharing(job, self.name) as this,
        ):
            this.prepare_logs()
            with Watch(this) as watch:
                attend(this, self.name, watch)
                for rank, start in enumerate(self.starts(this, port)):
                    _start(this, rank, start, watch)
                watch.wait()


@contextlib.contextmanager
def _unasked() -> Generator[None]:
    """For a few seconds in which nothing is left to be stopped, and how the job ended is still to be told."""
    asking = {*STOPPING, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asking)
    try:
        yield
    finally:
        while signal.sigtimedwait(asking - before, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(job: Job, rank: int, start: ProcessStart, watch: Watch) -> None:
    log = watch.keep(opened_log(log_path(job.log_dir, rank)))
    piped = job.output == "prefix"
    # With "first", rank 0 draws on the terminal itself; all else goes to the log files directly.
    direct = None if rank == 0 else log
    try:
        process = subprocess.Popen(
            list(start.command),
            env=dict(start.environment),
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else direct,
            stderr=subprocess.PIPE if piped else log,
            bufsize=0,
            start_new_session=True,
            preexec_fn=dies_with_parent(cores=start.cores),  # noqa: PLW1509 - the launcher has no threads
        )
    except OSError as problem:
        raise UsageError(f"cannot start {job.command[0]}: {problem.strerror}") from None
    kept: list[LogLines] = []

    def ended(code: int) -> None:
        for lines in kept:
            lines.flush()
        watch.ended(rank, code)

    watch.start(process, ended)
    watch.add_rank(rank, process.pid)
    if process.stdout is not None and process.stderr is not None:
        kept += [LogLines(log), LogLines(log)]
        watch.read(process.stdout, _keep_and_show(kept[0], rank, "out", watch))
        watch.read(process.stderr, _keep_and_show(kept[1], rank, "err", watch))


def _keep_and_show(
    lines: LogLines, rank: int, stream: Stream, watch: Watch
) -> Callable[[bytes], None]:
    def take(chunk: bytes) -> None:
        lines.feed(chunk)
        watch.display.feed(rank, stream, chunk)

    return take
