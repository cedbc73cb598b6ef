"""How much time an allocation has left, as its scheduler tells it.

    scheduler   known by                 asked by                            answers
    Slurm       SLURM_JOB_ID             squeue -h -j 7 -o "%A %L"           7 1-02:03:04
    PBS         PBS_JOBID                qstat -f 7.server                   walltime: its limit, what is used
    flux        FLUX_URI, FLUX_JOB_ID    flux job timeleft                   3541

What is left is asked for, not when the end is: clocks of nodes differ. PBS and flux were written against
their documentation: neither has run here.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fivefold.closing import Closing
from fivefold.errors import UsageError
from fivefold.launch.duration import seconds_of

__all__ = [
    "Scheduler",
    "TimeLeft",
    "duration_s",
    "flux_left_s",
    "pbs_left_s",
    "schedulers",
    "slurm_left_s",
]

Environ = Mapping[str, str]

_ANSWER_S = 5.0
_PBS_LAG_S = 600.0
"""PBS tells what a job has used some minutes late"""
_NO_LIMIT = (1 << 32) - 1
"""UINT_MAX, as flux says it"""
_EXAMPLES = "30s, 90m, 4h, 2d or 1-12:00:00"
_CLOCK = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<rest>\d{1,6}(?::\d{1,2}){0,2})", re.ASCII)


@dataclass(frozen=True)
class Scheduler:
    """Whom to ask, and how."""

    name: str
    command: tuple[str, ...]
    left_s: Callable[[str], float]
    """seconds that are left, from what the command says; infinite without a limit. Raises `ValueError`"""
    otherwise_s: Callable[[], float] = lambda: math.nan
    """the same where there is no answer; not a number: unknown"""


def schedulers(environ: Environ = os.environ) -> tuple[Scheduler, ...]:
    """Those in whose jobs this process runs: several, where flux runs in an allocation of Slurm."""
    found: list[Scheduler] = []
    if (job := environ.get("SLURM_JOB_ID", "")).isdecimal():
        ask = ("squeue", "-h", "-j", job, "-o", "%A %L")
        found.append(
            Scheduler("Slurm", ask, partial(slurm_left_s, job), partial(_slurm_told_s, environ))
        )
    if job := environ.get("PBS_JOBID", ""):
        found.append(Scheduler("PBS", ("qstat", "-f", job), pbs_left_s))
    if environ.get("FLUX_URI") or environ.get("FLUX_JOB_ID"):
        found.append(Scheduler("flux", ("flux", "job", "timeleft"), flux_left_s))
    return tuple(found)


def slurm_left_s(job: str, text: str) -> float:
    r"""Of the lines of squeue that of this job: it lists all tasks of an array that are named as their array.

    >>> slurm_left_s("7", "8 2:00\n7 1-00:00:59\n"), slurm_left_s("7", "7 UNLIMITED\n")
    (86459.0, inf)
    """
    line = re.search(rf"^{job} (\S+)$", text, re.MULTILINE)
    if line is None:
        raise ValueError(_last_line(text))
    return math.inf if line[1] == "UNLIMITED" else _clock_s(line[1])


def _slurm_told_s(environ: Environ) -> float:
    """From variables of newer Slurm, by this node's clock if that can be: containers may have no squeue."""
    begin, end = (environ.get(f"SLURM_JOB_{which}_TIME", "") for which in ("START", "END"))
    now = time.time()
    if begin.isdecimal() and end.isdecimal() and int(begin) <= now < int(end):
        return int(end) - now
    return math.nan


def pbs_left_s(text: str) -> float:
    r"""From the limit and what is used of it; from when the job began, if that is only a little more.

    >>> pbs_left_s(" Resource_List.walltime = 01:00:00\n resources_used.walltime = 00:10:00\n")
    3000.0
    """
    told = dict(re.findall(r"^\s*([\w.]+) = (.*)$", text, re.MULTILINE))
    if "job_state" in told and "Resource_List.walltime" not in told:
        return math.inf
    if "Resource_List.walltime" not in told:
        raise ValueError(_last_line(text))
    used_s = _clock_s(told.get("resources_used.walltime", "0:00"))
    try:
        since_s = time.time() - time.mktime(time.strptime(told.get("stime", "")))
    except (ValueError, OverflowError):
        since_s = used_s
    near = used_s <= since_s <= used_s + _PBS_LAG_S
    return _clock_s(told["Resource_List.walltime"]) - (since_s if near else used_s)


def flux_left_s(text: str) -> float:
    r"""Whole seconds.

    >>> flux_left_s("3541\n"), flux_left_s("4294967295\n")
    (3541.0, inf)
    """
    seconds = int(_last_line(text))
    return math.inf if seconds >= _NO_LIMIT else float(seconds)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1].strip()


def duration_s(option: str, text: str) -> float:
    """What a user asks for. Raises `UsageError`.

    >>> duration_s("--time-limit", "90m"), duration_s("--time-limit", "1-12:00:00")
    (5400.0, 129600.0)
    """
    try:
        seconds = _clock_s(text.strip())
    except ValueError:
        seconds = math.nan if text.strip().isdecimal() else seconds_of(option, text, _EXAMPLES)
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option} {text!r} is no time; write {_EXAMPLES}")
    return seconds


def _clock_s(text: str) -> float:
    """Seconds of D-HH:MM:SS, as Slurm writes it: without days, the last number is of seconds."""
    found = _CLOCK.fullmatch(text)
    if found is None or not (found["days"] or ":" in text):
        raise ValueError(text)
    numbers = [float(number) for number in found["rest"].split(":")]
    hours_first = [*numbers, 0.0, 0.0][:3] if found["days"] else [0.0, 0.0, *numbers][-3:]
    return (
        float(found["days"] or 0) * 86400
        + hours_first[0] * 3600
        + hours_first[1] * 60
        + hours_first[2]
    )


# ---- Asking


class TimeLeft(Closing):
    """When an allocation ends. Whoever asks goes on meanwhile, and looks for the answer now and then.

    A scheduler that does not answer in time, or not to the point, is told in a warning, once; what it said
    before holds.
    """

    def __init__(self, of: tuple[Scheduler, ...]) -> None:
        self._ends = dict.fromkeys(of, math.inf)
        self._open: dict[Scheduler, _Question] = {}
        self._warned: set[Scheduler] = set()
        self.asked_at = -math.inf
        """when it was asked last; of `time.monotonic`, as all times here"""
        self.longest_s = 0.0
        """the most that was ever left"""

    @property
    def end(self) -> float:
        """When the first of them ends the job; infinite without a limit, and where nothing is known."""
        return min(self._ends.values(), default=math.inf)

    def ask(self) -> None:
        """Ask all of them."""
        self.asked_at = time.monotonic()
        for scheduler in self._ends:
            self._open[scheduler] = _Question(scheduler.command)

    def answered(self, note: Callable[[str], object]) -> bool:
        """Take the answers that have come; whether none is open any more."""
        for scheduler, question in list(self._open.items()):
            if (said := question.answer()) is not None:
                del self._open[scheduler]
                question.close()
                self._take(scheduler, said, note)
        return not self._open

    def _take(self, scheduler: Scheduler, said: str, note: Callable[[str], object]) -> None:
        try:
            left_s = scheduler.left_s(said)
            if left_s <= 0:
                raise ValueError(f"{left_s:g} s are left")
        except ValueError:
            left_s = scheduler.otherwise_s()
        if not math.isnan(left_s):
            self._ends[scheduler] = self.asked_at + left_s
            if left_s < math.inf:
                self.longest_s = max(self.longest_s, self.end - self.asked_at)
        elif scheduler not in self._warned:
            self._warned.add(scheduler)
            known = self._ends[scheduler] < math.inf
            then = "what it said before holds" if known else "--time-limit would tell it"
            note(
                f"warning: {scheduler.name} does not tell when this job ends, {then} "
                f"({scheduler.command[0]}: {_last_line(said)})"
            )

    def close(self) -> None:
        """Ask no more."""
        for question in self._open.values():
            question.close()
        self._open.clear()


class _Question:
    """A command that answers soon, or never."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._until = time.monotonic() + _ANSWER_S
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        # What a user sets for his own use of squeue would hide jobs.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_")}
        try:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=self._file,
                stderr=self._file, start_new_session=True,
            )  # fmt: skip
        except OSError as problem:
            self._problem = problem.strerror or str(problem)

    def answer(self) -> str | None:
        """What it says, or what is wrong; None while there is neither."""
        if self._process is None:
            return self._problem
        if self._process.poll() is None:
            return f"no answer in {_ANSWER_S:g} s" if time.monotonic() > self._until else None
        self._file.seek(0)
        return self._file.read().decode(errors="replace")

    def close(self) -> None:
        """End it."""
        self._file.close()
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
                self._process.wait(1.0)
