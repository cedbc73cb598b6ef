"""A job whose ranks fail starts them again, if it may.

Where a run was lost is noted in `fivefold-logs`, for jobs that go on with it later:

    a job     lost after step 7 ── again ── its time is up    lost-RUN: 7 1
    the next  lost after step 7 ──> an older save ── lost after step 7 ──> given up

What is no mishap ends it at once: a user's mistake (code 2 after `error: ...`), a run that saved because a
signal asked (code 75), a signal to the launcher. Nor does a job start again that is to end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from fivefold.errors import LaunchError, UsageError
from fivefold.launch.ending import Ending
from fivefold.launch.job import LOGS, Job, RankFailure, Resumable, Stalled, Stopped
from fivefold.launch.progress import VARIABLE, ProgressFile, RankProgress, newest

__all__ = ["FinalFailure", "GivenUp", "restarting"]

_NOT_AGAIN = "note: a signal asks for an end, and nothing starts again"

_LONGEST_PAUSE_S = 60.0
_MOST_AT_A_STEP = 3


class FinalFailure(LaunchError):
    """Starting again would not help."""


class GivenUp(LaunchError):
    """All restarts are used up, or would not help. Whoever queues jobs again should not do so."""

    exit_code = 76


def restarting(
    job: Job,
    start: Callable[[Job], None],
    pause: Callable[[float], bool] | None = None,
    note: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
    progress: Callable[[], Sequence[RankProgress]] | None = None,
) -> None:
    """Run `start`, again with another folder of logs after each failure, `job.restarts` times at most.

    The first comes at once. Between others that end within a minute and get no further, pauses grow, from 1 s
    to a minute: what is wrong may need time to pass. `pause` waits so many seconds, and says whether a signal
    has asked to save and end: then nothing starts again. `note` tells people, and `progress` how far the
    ranks are, where they do not tell it here. Raises `GivenUp` for a failure of the last start where
    others were allowed, or of a step that fails again and again; what is no mishap and `FinalFailure` at
    once.
    """
    with contextlib.ExitStack() as undo:
        if progress is None and job.reports_progress:
            file = undo.enter_context(ProgressFile(job.processes))
            job = replace(job, progress=file, environment={**job.environment, VARIABLE: file.path})
            progress = file.read
        pause = pause or undo.enter_context(_noticing()).wait
        losses, pause_s, avoided = _Losses(note), 0.0, ""
        for number in range(job.restarts + 1):
            began = time.monotonic()
            try:
                start(_again(job, number, avoided, note))
            except (Resumable, Stopped, FinalFailure):
                raise
            except LaunchError as problem:
                if not job.restarts or (job.ending is not None and job.ending.why):
                    raise
                reached = newest(progress() if progress is not None else ())
                further, older = losses.after(problem, reached)
                if number == job.restarts and not isinstance(problem, RankFailure | Stalled):
                    raise  # other nodes may do
                if number == job.restarts:
                    losses.forget(reached)
                    raise GivenUp(
                        f"{problem}\n  given up: restart {number} of {number} failed too"
                    ) from problem
                quick = number and not further and time.monotonic() - began < _LONGEST_PAUSE_S
                pause_s = min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S) if quick else 0.0
                when = f"in {pause_s:g} s" if pause_s else "now"
                avoided = f"{reached.run:x}:{reached.resumed}" if older else ""
                how = f", from a save before step {reached.resumed}" if older else ""
                note(f"warning: {problem}\nrestart {number + 1} of {job.restarts} {when}{how}")
                if _over(pause(pause_s), job.ending, note):
                    raise
            else:
                losses.forget(newest(progress() if progress is not None else ()))
                return


def _over(asked: bool, ending: Ending | None, note: Callable[[str], object]) -> bool:
    """Whether a signal has asked for an end in a pause, or ranks would be asked to end."""
    if asked:
        note(_NOT_AGAIN)
    elif ending is not None:
        ending.look(note)
    return asked or (ending is not None and bool(ending.why))


@contextlib.contextmanager
def _noticing() -> Generator[threading.Event]:
    """What is set when a signal asks to save and end while no ranks run: it would kill the launcher.

    Its handler tells nobody: who is interrupted may be about to write to the terminal, which raises then.
    """
    asked = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        yield asked
        return

    signal.signal(signal.SIGUSR1, lambda _number, _frame: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class _Losses:
    """Where the run was lost so far, by earlier jobs in the same directory too."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._furthest = self._step = -1
        self._times = self._before = 0

    def after(self, problem: LaunchError, reached: RankProgress) -> tuple[bool, bool]:
        """Whether a start got further than all before it; and whether its save is not to be used again.

        A run that fails twice after the same step may have saved what makes it fail: then it goes on from an
        older save. Nodes that are lost say nothing about the run. Raises
        `GivenUp` after the third time.
        """
        further, self._furthest = reached.step > self._furthest, max(reached.step, self._furthest)
        step = max(reached.step, reached.given - 1)
        began = reached.steps > 0 or reached.given > reached.step or reached.step > reached.resumed
        if step < 0 or not began or not isinstance(problem, RankFailure | Stalled):
            return further, False  # it was lost on its way there, or with a node
        if not self._times:
            self._step, self._times = self._noted(reached)
            self._before = self._times if step == self._step else 0
        self._times = self._times + 1 if step == self._step else 1
        self._step = step
        if self._times >= _MOST_AT_A_STEP:
            self.forget(reached)
            before = f", {self._before} of them in jobs before this" if self._before else ""
            raise GivenUp(
                f"{problem}\n  given up: the run was lost {self._times} times after step {step}{before}"
            ) from problem
        self._keep(reached)
        return further, self._times > 1 and reached.resumed > 0

    def _file(self, reached: RankProgress) -> Path:
        return LOGS / f"lost-{reached.run:x}"

    def _noted(self, reached: RankProgress) -> tuple[int, int]:
        """After which step earlier jobs lost the run, and how often."""
        try:
            step, times = map(int, self._file(reached).read_text().split())
        except (OSError, ValueError):  # there is no such file, or not of ours
            return -1, 0
        return step, times

    def _keep(self, reached: RankProgress) -> None:
        if reached.run < 0:
            return
        try:
            LOGS.mkdir(exist_ok=True)
            self._file(reached).write_text(f"{self._step} {self._times}\n")
        except OSError as problem:
            self._note(f"warning: later jobs will not know of this failure: {problem}")

    def forget(self, reached: RankProgress) -> None:
        """The run has ended, or whoever starts it once more has been told."""
        with contextlib.suppress(OSError):
            self._file(reached).unlink()


def _again(job: Job, number: int, avoided: str, note: Callable[[str], object]) -> Job:
    """The job as it is started for the `number`-th time after the first, with the restarts that are left.

    A disk that is full is no reason to end: then the logs are those of the first start.
    """
    if job.progress is not None:
        job.progress.clear()
    if not number:
        return job
    folder = job.log_dir / f"restart-{number}"
    environment = {**job.environment, "FIVEFOLD_RESTART": str(number)}
    if avoided:
        environment["FIVEFOLD_RESUME_BEFORE"] = avoided
    if environment.get("FIVEFOLD_TRACE") == str(job.log_dir.resolve() / "trace"):
        environment["FIVEFOLD_TRACE"] = str(folder.resolve() / "trace")
    this = replace(
        job,
        log_dir=folder,
        environment=environment,
        restarts=job.restarts - number,
    )
    try:
        this.make_log_dir()
    except UsageError as problem:
        note(f"warning: {problem}; what ranks write follows in {job.log_dir}")
        this = replace(this, log_dir=job.log_dir)
    return this
