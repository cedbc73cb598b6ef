"""The ranks of a job under supervision: who failed first, and how the rest are stopped.

running --- a rank fails ------------------> stopping: SIGTERM to every process started
   |    --- time is nearly up, or halt ------> SIGUSR1 to every rank that handles it; what is left at the end:
   |                                          stopping: SIGTERM
   |    --- SIGINT, SIGTERM, SIGHUP -------> stopping: the same signal to every rank
   |                                            | grace is over, or a second signal
   |                                         killing: SIGKILL to every process group
   +--- all have ended ---> sweep: what they left behind in their groups is ended too
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence

from fivefold.cluster.processes import handles
from fivefold.errors import UsageError
from fivefold.launch.ending import Ending
from fivefold.launch.job import (
    Job,
    RankFailure,
    Resumable,
    Stalled,
    Stopped,
    log_path,
    named,
    tail,
)
from fivefold.launch.output import Display
from fivefold.launch.progress import RankProgress
from fivefold.launch.supervisor import STOPPING, SWEEP_GRACE_S, Supervised, Supervisor
from fivefold.launch.variables import read_seconds

__all__ = ["Watch"]

FAILURE_GRACE_S = 3.0
SAVING_GRACE_S = 30.0
"""how long ranks may go on saving when one of them has saved and ended"""
SAVING_S = 600.0
"""how long ranks that were asked to save may give no sign of life"""
UNSEEN_S = 30.0
"""that ranks may take to `ff.start()` before it is told that nothing is seen of them"""
DEAF_S = 5.0
"""how long a rank that is to save may do without a handler for the signal before that is told"""
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
        self._pids: dict[int, int] = {}
        """by rank, of those on this node that run"""
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
        self._told: set[int] = set()
        """ranks that have got SIGUSR1"""
        self._deaf_told = False
        self._cut_off: list[int] = []
        """ranks whose patience ran out"""
        self._stopping = self.display.silent = False
        self._stopped_by = 0
        self._asked = 0
        """the last signal that asked the launcher to end, even if it was ending the ranks already"""
        self._deadline = float("inf")
        self._stalled: Stalled | None = None
        self._signalled_at = -math.inf

    def progress(self) -> Sequence[RankProgress]:
        """How far the ranks are, as far as they tell."""
        return [] if self.job.progress is None else self.job.progress.read()

    def start(
        self,
        process: Supervised,
        on_exit: Callable[[int], None],
        after_s: float = 0.0,
        *,
        awaited: bool = True,
    ) -> None:
        """See `Supervisor.start`.

        One that is not `awaited` ends with the others, and nothing ends with it.
        """
        if awaited:
            self._awaited.append(process)
        super().start(process, on_exit, after_s)

    def add_shim(self, rank: int, pid: int) -> None:
        """Send signals for `rank` to this process, not through the launcher that started it.

        torchrun and mpirun kill ranks a second after a signal or send it twice: no time to save.
        """
        self._shims[rank] = pid

    def add_rank(self, rank: int, pid: int) -> None:
        """Where a rank runs."""
        self._pids[rank] = pid

    def later(self, pause_s: float, function: Callable[[], object]) -> None:
        """Call `function` after a pause, unless the job has ended, or is being stopped, by then."""
        if not self._stopping:
            super().later(pause_s, function)

    def ended(self, rank: int, code: int) -> None:
        """A rank has ended: with an exit code, or with minus the signal that killed it."""
        self._ended.append((rank, code))
        self._pids.pop(rank, None)
        if rank in self._shims:
            self._shims[rank] = 0

    def wait(self) -> None:
        """Return when all processes have ended well.

        Raises `RankFailure` for the first rank that did not, `UsageError` with its message if that
        rank ended with code 2 after `error: ...`, `Resumable` if with code 75, and `Stopped`
        if a signal stopped the launcher, unless all ranks then saved and ended with code 75.
        """
        if self.job.stall_s:
            self._look_for_stall((), 0.0, 0.0)
        while self._running():
            self._turn()
        self._settle()
        self._conclude()

    def _look_for_stall(
        self, before: Sequence[RankProgress], idle_s: float, silent_s: float
    ) -> None:
        """Whether the ranks have done something since they were looked at; and again, a little later.

        `idle_s` is how long they have not, counted in looks: while a whole job is suspended, none comes.
        """
        pause_s, found = min(self.job.stall_s / 4, 1.0), self.progress()
        if found != before or time.monotonic() < self._asked_to_save + SAVING_S:
            before, idle_s = found, 0.0
        watched = bool(found) and all(one.signs >= 0 for one in found)
        if watched and idle_s >= self.job.stall_s:
            self._stalled = Stalled(self.job, found)
            self._stop(signal.SIGTERM, self._failure_grace_s(1))
            return
        if silent_s <= UNSEEN_S < silent_s + pause_s and all(one.signs < 0 for one in found):
            self.display.note(
                f"warning: --stall {self.job.stall_s:g}s sees nothing of the ranks: it looks at what "
                "ff.start(), model.step() and a Checkpointer tell"
            )
        following = before, idle_s + pause_s, silent_s + pause_s
        self.later(pause_s, lambda: self._look_for_stall(*following))

    @property
    def _asked_to_save(self) -> float:
        """When the ranks were asked to save and end; long ago if they were not."""
        ending = self.job.ending
        by_time = ending.asked_at if ending is not None and ending.why else -math.inf
        return max(self._signalled_at, by_time)

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
        elif self._stalled is not None and not self._asked:
            raise self._stalled
        if self._stopped_by:
            codes = list(self._codes.values())
            saved = codes == [Resumable.exit_code] * self.job.processes
            raise Resumable(self.job) if saved else Stopped(self._stopped_by, self.job)

    def _turned(self) -> None:
        self._awaited = [process for process in self._awaited if process in self._on_exit]
        self._judge()
        if self.display.broken and not self._stopping:
            self._stop(signal.SIGPIPE, self._grace_s)
        if self.job.ending is not None and not self._stopping:
            self._mind_time(self.job.ending)
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._cut_off = self._left()
            self._end_ranks()

    def _timeout(self) -> float | None:
        ending = self.job.ending
        limits = [super()._timeout(), self._deadline - time.monotonic()]
        limits.append(None if ending is None or self._stopping else ending.wait_s())
        soonest = min(s for s in (*limits, float("inf")) if s is not None)
        return None if soonest == float("inf") else max(0.0, soonest)

    def _mind_time(self, ending: Ending) -> None:
        """Ask the ranks to save if it is time, and end them if it is over."""
        if ending.wait_s():
            return
        ending.measured(self.progress())
        if not ending.look(self.display.note) or not ending.why:
            return
        asked = self._ask_ranks()
        deaf = [rank for rank in self._left() if rank not in self._told]
        patient = time.monotonic() < ending.asked_at + min(DEAF_S, ending.left_s / 2)
        if asked and deaf and not patient and not self._deaf_told:
            self._deaf_told = True
            self.display.note(
                f"warning: {named(deaf)} cannot be asked to save: no Checkpointer so far, nor another "
                "handler of SIGUSR1"
            )
        if ending.over():
            self._stop(signal.SIGTERM, ending.spare_s / 2)

    def _left(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in range(self.job.processes) if rank not in self._codes]

    def _ask_ranks(self) -> bool:
        """SIGUSR1, once, to each rank that handles it: others would die of it. Whether ranks were started."""
        for rank, pid in self._pids.items():
            if rank not in self._told and handles(pid, signal.SIGUSR1):
                self._told.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._shims.get(rank) or pid, signal.SIGUSR1)
        return True

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
        ending = self.job.ending
        if code == Resumable.exit_code:
            if ending is None or not (ending.why or ending.end < float("inf")):
                return max(self._grace_s, SAVING_GRACE_S)
            return min(ending.left_s, max(self._grace_s, read_seconds("FIVEFOLD_TIMEOUT_S", 600.0)))
        # Ranks that start again at once have nothing to gain from a slow end.
        return 0.0 if self.job.restarts and code != UsageError.exit_code else FAILURE_GRACE_S

    def _end_ranks(self) -> None:
        """At once: there was time enough."""
        self._kill(signal.SIGKILL)

    def _failure(self, rank: int, code: int) -> Exception:
        if code == Resumable.exit_code:
            return Resumable(self.job, self._cut_off)
        told = _usage_error(self.job, rank, code)
        return UsageError(told) if told is not None else RankFailure(rank, code, self.job)

    def _signalled(self, signum: int) -> None:
        if signum not in STOPPING:
            if signum == signal.SIGUSR1:
                if self.job.ending is not None and self.job.ending.why:
                    return  # who saves takes a second one for impatience
                self._told.update(range(self.job.processes))
                self._signalled_at = time.monotonic()
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
