"""A job as data, and the two ways in which it ends."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from fivefold.cluster import granted_cores
from fivefold.errors import LaunchError, UsageError
from fivefold.launch.ending import Ending, limit_within
from fivefold.launch.environment import without_places
from fivefold.launch.helpers import Helpers
from fivefold.launch.progress import ProgressFile, RankProgress
from fivefold.launch.shrinking import Shrinking
from fivefold.launch.variables import check_variables

__all__ = [
    "LOGS",
    "Job",
    "NodeRanks",
    "Outcome",
    "ProcessStart",
    "RankFailure",
    "Resumable",
    "Stalled",
    "Stopped",
    "default_log_dir",
    "ended",
    "helper_log_path",
    "log_path",
    "named",
    "opened_log",
    "tail",
]

LOGS = Path("fivefold-logs")
_LAUNCH = os.urandom(8).hex()
"""this process"""
TAIL_LINES = 20


@dataclass(frozen=True)
class NodeRanks:
    """How many ranks of a job run on a node; 0 if it only stands by."""

    host: str
    """a name or address that a remote shell and the scheduler know"""
    ranks: int
    cores: tuple[int, ...] = ()
    """logical cores that they may use; empty: all that are granted there"""
    python: str = ""
    """its Python, where that has another path than here"""
    local: bool = False
    """whether it is this node"""


@dataclass(frozen=True)
class Job:
    """What to start: the same command in every process.

    `environment` is added to the launcher's own. Every rank's output is kept in `rank-N.log` in
    `log_dir`. `output` says what of it is shown as well: "prefix" shows all lines, each after `[N] `;
    "first" gives the terminal to rank 0 (its standard output only) and shows nothing else.
    `port` is where the ranks meet; None picks a free one. `helpers` run beside the ranks; the output of
    each is kept in `helper-N.log`, and shown after `[hN] `. `nodes` says where the ranks run, in their
    order; empty: all on this one. After a failure all ranks start again, `restarts` times at most. With
    `fork` those of a node are forked from one process; with `stage` they import from copies on their node. No
    sign of life from any rank for `stall_s` seconds is
    a failure; 0: it may take as long as it likes. `progress` is where they tell how far they are, on this
    node. `shrinking` lets it go on with fewer nodes when spares are used up. `ending` says when they have to
    end; None: never. `explains`: the command first tells where it runs.
    """

    command: Sequence[str]
    processes: int
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    output: Literal["prefix", "first"] = "prefix"
    port: int | None = None
    helpers: Helpers | None = None
    nodes: tuple[NodeRanks, ...] = ()
    restarts: int = 0
    fork: bool = False
    stage: bool = False
    stall_s: float = 0.0
    progress: ProgressFile | None = None
    shrinking: Shrinking | None = None
    ending: Ending | None = None
    explains: bool = False

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UsageError(f"{self.processes} processes asked for; at least 1 is needed")
        if self.port is not None and not 0 < self.port < 65536:
            raise UsageError(f"port {self.port} does not exist; ports go from 1 to 65535")
        if self.restarts < 0:
            raise UsageError(f"{self.restarts} restarts asked for; 0 or more are possible")
        if not 0 <= self.stall_s < float("inf"):
            raise UsageError(f"--stall {self.stall_s:g}: a positive number of seconds is needed")
        check_variables({**os.environ, **self.environment})

    @property
    def reports_progress(self) -> bool:
        """Whether anybody wants to know how far the ranks are."""
        in_time = self.ending is not None and self.ending.in_time
        return bool(self.restarts or self.stall_s or in_time)

    def prepare_logs(self) -> None:
        """Create the log folder, unless its ranks start again: then that has been done. Raises the same."""
        if "FIVEFOLD_RESTART" not in self.environment:
            self.make_log_dir()

    def make_log_dir(self) -> None:
        """Create the log folder. Raises `UsageError` if it cannot be written or holds other logs.

        `Resumable` if a file there, or in the one of the first start, asks for an end.
        """
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            used = any(self.log_dir.glob("rank-*.log"))
            with tempfile.TemporaryFile(dir=self.log_dir):
                pass  # files can be made there
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise UsageError(
                f"cannot write logs to {self.log_dir}: {reason}; choose another folder with --log-dir"
            ) from None
        if used:
            raise UsageError(
                f"{self.log_dir} holds the logs of another run; choose another --log-dir"
            )
        if self.ending is not None and self.ending.halts():
            raise Resumable(self)

    def rank_environment(self, engine: str) -> dict[str, str]:
        """The environment that all ranks share: the launcher's, without a place in some outer job.

        Unless the user set OMP_NUM_THREADS, the granted cores are divided among the ranks: with the
        default of every library, all cores in every rank, they would fight each other. Cores of helpers are
        not theirs.
        """
        environ = without_places(os.environ)
        environ["FIVEFOLD_ENGINE"], environ["FIVEFOLD_LAUNCH"] = engine, _LAUNCH
        threads = granted_cores() if self.helpers is None else self.helpers.threads
        environ.setdefault("OMP_NUM_THREADS", str(max(1, threads // self.processes)))
        environ.setdefault("PYTHONUNBUFFERED", "1")
        environ |= limit_within(None if self.ending is None else self.ending.limit_left_s)
        told = {} if self.helpers is None else self.helpers.for_trainers()
        return {**environ, **self.environment, **told}


@dataclass(frozen=True)
class ProcessStart:
    """A process that an engine starts: its command, and its whole environment."""

    command: Sequence[str]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    """logical cores that it may use; empty: all that were granted"""


@dataclass(frozen=True)
class Outcome:
    """A job whose ranks all ended well. `wall_s` is the time from start to end in seconds."""

    processes: int
    wall_s: float


class RankFailure(LaunchError):
    """A rank ended with an error; the others were stopped.

    `code` is its exit code, or minus the signal that killed it. The command line exits with the same
    code, or with 128 + signal, as a shell does.
    """

    def __init__(self, rank: int, code: int, job: Job) -> None:
        self.rank, self.code = rank, code
        self.exit_code = code if code > 0 else 128 - code
        log = log_path(job.log_dir, rank)
        others = "; the other ranks were stopped" if job.processes > 1 else ""
        lines = tail(log)
        last = "\n".join(f"    {line}" for line in lines) if lines else f"    ({_why_empty(log)})"
        super().__init__(
            f"rank {rank} of {job.processes} {ended(code)}{others}\n  last lines of {log}:\n{last}\n"
            f"  logs of all ranks: {job.log_dir}/rank-*.log"
        )


class Stalled(LaunchError):
    """No rank gave a sign of life for too long; they were stopped.

    `ranks` tells how far each was, and `culprit` is who holds the others up, if that is known: by the hang
    watch of a traced run, or since it alone has begun fewer steps.
    """

    def __init__(self, job: Job, ranks: Sequence[RankProgress]) -> None:
        told = [found for rank in range(job.processes) if (found := _hang(job, rank))]
        named = re.search(r" for rank (\d+)$", told[-1]) if told else None
        least = min(one.steps for one in ranks)
        fewest = [rank for rank, one in enumerate(ranks) if one.steps == least]
        behind = fewest[0] if len(fewest) == 1 and len(ranks) > 1 else None
        self.culprit = int(named[1]) if named else behind
        most = max(one.steps for one in ranks)
        if behind is not None:
            where = f"rank {behind} is behind, in step {least}, others are in step {most}"
        else:
            where = f"all are in step {most}" if len(ranks) > 1 else f"it is in step {most}"
        super().__init__(
            f"no sign of life for {job.stall_s:g} s, and the ranks were stopped: {where} of this start"
            + "".join(f"\n  {line}" for line in told[-1:])
            + f"\n  logs of all ranks: {job.log_dir}/rank-*.log"
        )


def _hang(job: Job, rank: int) -> str:
    """The last line by which the hang watch of a rank says who is waited for."""
    lines = tail(log_path(job.log_dir, rank), lines=200)
    return next((line for line in reversed(lines) if line.startswith("fivefold: hang: ")), "")


def _why_empty(log: Path) -> str:
    """Of a rank whose log holds nothing: what it wrote may be lost."""
    try:
        with log.open("ab", buffering=0) as file:
            file.write(b"\n")
    except FileNotFoundError:
        pass  # it has none
    except OSError as problem:
        return f"what it wrote is not kept: {problem.strerror}; free space there, or choose another folder"
    return "it wrote nothing"


class Resumable(LaunchError):
    """The ranks ended with code 75, as a run does that a signal asked to end: it can go on."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h, try again"""
    label = "note"

    def __init__(self, job: Job, cut_off: Sequence[int] = ()) -> None:
        why = "a signal asked" if job.ending is None else job.ending.why or "a signal asked"
        logs = f"logs of all ranks: {job.log_dir}/rank-*.log"
        if not any(job.log_dir.glob("rank-*.log")):
            logs = "no rank was started"
        late = f"{named(cut_off)} took too long and had to be ended; " if cut_off else ""
        super().__init__(
            f"the run ended with code 75 (try again), as runs do that save and end because {why}; "
            f"the same command goes on from there; {late}{logs}"
        )


class Stopped(LaunchError):
    """A signal stopped the launcher, which stopped its ranks."""

    def __init__(self, signum: int, job: Job) -> None:
        self.exit_code = 128 + signum
        name = (
            "interrupted"
            if signum == signal.SIGINT
            else f"stopped by {signal.Signals(signum).name}"
        )
        if job.ending is not None and job.ending.over():
            name = "time is up, and not all ranks had saved"
        super().__init__(
            f"{name}; all {job.processes} ranks were stopped; logs are in {job.log_dir}"
        )


def named(ranks: Sequence[int]) -> str:
    """Some ranks, for people.

    >>> named([3]), named(range(10))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    some = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    return some + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def ended(code: int) -> str:
    """How a process ended, in words, from its exit code or minus the signal.

    >>> ended(3), ended(-9)
    ('exited with code 3', 'was killed by SIGKILL (out of memory?)')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def log_path(log_dir: Path, rank: int) -> Path:
    """Where the output of a rank is kept."""
    return log_dir / f"rank-{rank}.log"


def helper_log_path(log_dir: Path, number: int) -> Path:
    """Where the output of a helper is kept."""
    return log_dir / f"helper-{number}.log"


def opened_log(path: Path) -> IO[bytes]:
    """A log to be added to. Raises `UsageError` if it cannot be written."""
    try:
        return path.open("ab", buffering=0)
    except OSError as problem:
        raise UsageError(
            f"cannot write {path}: {problem.strerror}; choose another folder with --log-dir"
        ) from None


def tail(path: Path, lines: int = TAIL_LINES, most_bytes: int = 16384) -> list[str]:
    """The last lines of a text file, empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rpartition("\r")[2] or line for line in text.rstrip().split("\n") if line][-lines:]


def default_log_dir() -> Path:
    """`fivefold-logs/<date>-<time>-<pid>`, under the working directory."""
    return LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
