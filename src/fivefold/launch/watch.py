"""The ranks of a job under supervision: who failed first, and how the rest are stopped.

running --- a rank fails ------------------> stopping: SIGTERM to every process started
   |    --- SIGINT, SIGTERM, SIGHUP -------> stopping: the same signal to every rank
   |                                            | grace is over, or a second signal
   |                                         killing: SIGKILL to every process group
   +--- all have ended ---> sweep: what they left behind in their groups is ended too
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from fivefold.errors import UsageError
from fivefold.launch.job import Job, RankFailure, Resumable, Stopped, log_path, tail
from fivefold.launch.output import Display
from fivefold.launch.supervisor import STOPPING, SWEEP_GRACE_S, Supervised, Supervisor
from fivefold.launch.variables import read_seconds

__all__ = ["Watch"]

FAILURE_GRACE_S = 3.0
SAVING_GRACE_S = 30.0
"""how long ranks may go on saving when one of them has saved and ended"""
CAUSE_S = 2.0
"""how long a rank that failed since another one had gone waits for that one to end"""


class Watch(Supervisor):
    """Supervises the ranks of one job: `start` processes and `read` their pipes, then `wait`.

    Report a rank's end with `ended`.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.display = Display(job.output)
        self._grace_s = read_seconds("FIVEFOLD_GRACE_S", 5.0)
        self._awaited: list[Supervised] = []
        self._shims: dict[int, int] = {}
        """by rank, of the ranks that a foreign launcher started: the process that passes signals on to it"""
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of the ranks yet."""
        self._ended: list[tuple[int, int]] = []
        self._codes: dict[int, int] = {}
        """by rank, of all that have ended"""
        self._first: tuple[int, int] | None = None
        self._follower: tuple[int, int] | None = None
        """the first that failed, where that was the failure of another one"""
        self._stopping = self.display.silent = False
        self._stopped_by = 0
        self._asked = 0
        """the last signal that asked the launcher to end, even if it was ending the ranks already"""
        self._deadline = float("inf")

    def start(
        self,
        process: Supervised,
        on_exit: Callable[[int], None],
        *,
        awaited: bool = True,
    ) -> None:
        """See `Supervisor.start`.

        One that is not `awaited` ends with the others, and nothing ends with it.
        """
        if awaited:
            self._awaited.append(process)
        super().start(process, on_exit)

    def add_shim(self, rank: int, pid: int) -> None:
        """Send signals for `rank` to this process, not through the launcher that started it.

        torchrun and mpirun kill ranks a second after a signal or send it twice: no time to save.
        """
        self._shims[rank] = pid

    def later(self, pause_s: float, function: Callable[[], object]) -> None:
        """Call `function` after a pause, unless the job has ended, or is being stopped, by then."""
        if not self._stopping:
            super().later(pause_s, function)

    def ended(self, rank: int, code: int) -> None:
        """A rank has ended: with an exit code, or with minus the signal that killed it."""
        self._ended.append((rank, code))
        if rank in self._shims:
            self._shims[rank] = 0

    def wait(self) -> None:
        """Return when all processes have ended well.

        Raises `RankFailure` for the first rank that did not, `UsageError` with its message if that
        rank ended with code 2 after `error: ...`, `Resumable` if with code 75, and `Stopped`
        if a signal stopped the launcher, unless all ranks then saved and ended with code 75.
        """
        while self._running():
            self._turn()
        self._settle()
        self._conclude()

    def _running(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._awaited)

    def _settle(self) -> None:
        """End what the ranks have left behind."""
        self._sweep(SWEEP_GRACE_S)
        self._drain()

    def _conclude(self) -> None:
        """Raise what `wait` does."""
        self._first = self._first or self._follower
        if self._asked and self.job.restarts:
            self._stopped_by = self._asked  # whoever asks for an end wants no other start
        elif self._first is not None:
            raise self._failure(*self._first)
        if self._stopped_by:
            codes = list(self._codes.values())
            saved = codes == [Resumable.exit_code] * self.job.processes
            raise Resumable(self.job) if saved else Stopped(self._stopped_by, self.job)

    def _turned(self) -> None:
        self._awaited = [process for process in self._awaited if process in self._on_exit]
        self._judge()
        if self.display.broken and not self._stopping:
            self._stop(signal.SIGPIPE, self._grace_s)
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._end_ranks()

    def _timeout(self) -> float | None:
        soonest, deadline = super()._timeout(), self._deadline - time.monotonic()
        if deadline == float("inf"):
            return soonest
        return max(0.0, deadline if soonest is None else min(soonest, deadline))

    def _judge(self) -> None:
        """Find the rank that failed first among those that ended since the last turn."""
        # A rank whose peer was killed fails too, milliseconds later: a signal is the likelier cause.
        self._codes.update(self._ended)
        failed = sorted((code > 0, rank, code) for rank, code in self._ended if code != 0)
        if failed and not self._stopping:
            self._note(failed)
        usage = self._first is not None and _usage_error(self.job, *self._first) is not None
        for rank, _ in self._ended:
            self.display.close(rank, usage_error=usage)
        self._ended.clear()
        if self._first is not None and not self._stopping:
            code = self._first[1]
            # Who has saved is followed by the others; to them, a second signal would say to end at once.
            signum = 0 if code == Resumable.exit_code else signal.SIGTERM
            self._stop(signum, self._failure_grace_s(code))

    def _note(self, failed: list[tuple[bool, int, int]]) -> None:
        """Who failed first; a rank that another one has left often ends before that one."""
        causes = [(rank, code) for _, rank, code in failed if not _followed(self.job, rank)]
        if causes:
            self._first = causes[0]
        elif self._follower is None:
            self._follower = failed[0][1:]
            self.later(CAUSE_S, self._take_follower)

    def _take_follower(self) -> None:
        self._first = self._follower
        self._stop(signal.SIGTERM, self._failure_grace_s(1))

    def _stop(self, signum: int, grace_s: float) -> None:
        self._stopping = self.display.silent = True
        self._due.clear()
        self._deadline = time.monotonic() + grace_s
        if self._first is None:
            self._stopped_by = signum
        if signum:
            self._signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def _signal(self, signum: int) -> None:
        """Send a signal to the ranks, or to what starts them where a rank has not started or has failed."""
        if self._first is None and len(self._shims) == self.job.processes:
            for pid in filter(None, self._shims.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        else:
            for process in self._awaited:
                process.send_signal(signum)

    def _failure_grace_s(self, code: int) -> float:
        """How long the others may take to end after one has ended with this code."""
        if code == Resumable.exit_code:
            return max(self._grace_s, SAVING_GRACE_S)
        # Ranks that start again at once have nothing to gain from a slow end.
        return 0.0 if self.job.restarts and code != UsageError.exit_code else FAILURE_GRACE_S

    def _end_ranks(self) -> None:
        """At once: there was time enough."""
        self._kill(signal.SIGKILL)

    def _failure(self, rank: int, code: int) -> Exception:
        if code == Resumable.exit_code:
            return Resumable(self.job)
        told = _usage_error(self.job, rank, code)
        return UsageError(told) if told is not None else RankFailure(rank, code, self.job)

    def _signalled(self, signum: int) -> None:
        if signum not in STOPPING:
            self._signal(signum)
            return
        self._asked = signum
        if self._stopping:
            self._deadline = 0.0  # asked again: no more patience
        else:
            self._stop(signum, self._grace_s)


def _followed(job: Job, rank: int) -> bool:
    """Whether a rank says that it failed in talking with the others."""
    return any("CommError: " in line for line in tail(log_path(job.log_dir, rank)))


def _usage_error(job: Job, rank: int, code: int) -> str | None:
    """The text after `error: ` if the rank told a user's mistake and ended with code 2."""
    if code != UsageError.exit_code:
        return None
    told = [line for line in tail(log_path(job.log_dir, rank)) if line.startswith("error: ")]
    return told[-1].removeprefix("error: ") if told else None
