"""When a run has to end: ranks are asked to save while there is time for it.

    start ──────────── train ────────────┬──── save, end with 75 ────┬─ stop ──┤
                                         asked (SIGUSR1)             over      end of the allocation
                                         |<----------- lead -------------------|   twice what ranks took
                                                                     |<-spare->|

A file `halt` in the folder of the logs asks as well, at any time.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.closing import Closing
from fivefold.cluster.processes import process_stat
from fivefold.launch.progress import RankProgress
from fivefold.launch.variables import read_seconds

if TYPE_CHECKING:
    from fivefold.launch.time_left import TimeLeft

__all__ = ["ENDS_AT", "HALT", "JOBS", "Ending", "limit_within"]

ENDS_AT = "FIVEFOLD_ENDS_AT"
"""PID:SECONDS, for a job within the job: when that process has to have ended, by `time.monotonic`"""

HALT = "halt"
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "FLUX_URI", "FLUX_JOB_ID")
"""variables by which schedulers are known, see `fivefold.launch.time_left`"""
_LEAD_S, _LEAD_SHARE = 120.0, 0.1
_LEAST_S = 30.0
"""the same where it was measured how long a save and its copy take"""
_FACTOR = 2.0
"""a save and a copy may be under way when ranks are asked"""
_SPARE_S = 5.0
_LOOK_S = 2.0
_SOON_S = 0.25
"""between looks while something is awaited"""
_ASK_AGAIN_S = 180.0
"""after which the scheduler is asked once more: limits may be changed"""
_ASK_BEFORE_S = 10.0
"""so long before ranks are asked to end, the scheduler is asked whether that still holds"""


class Ending(Closing):
    """Whether a run has been asked to end, and how long it may take. Times are of `time.monotonic`.

    Args:
        folder: of the logs of the whole run, where `halt` may appear.
        limit_s: seconds from now after which the run has to have ended; that of a job around it counts too.
        allocation: what asks the scheduler.
    """

    def __init__(
        self, folder: Path, limit_s: float = math.inf, allocation: TimeLeft | None = None
    ) -> None:
        self._file = folder / HALT
        now = time.monotonic()
        self._limit_s = min(limit_s, _end_around() - now)
        self._limit = now + self._limit_s
        self._allocation = allocation
        self._told_lead_s = read_seconds("FIVEFOLD_END_S", 0.0)
        self._saving_s = self._copying_s = -1.0
        self._next = 0.0
        self._warned = False
        self.why = ""
        """why the ranks are to save and end; empty: they are not"""
        self.halted = False
        """whether somebody wants that, rather than that time is up"""
        self.asked_at = math.inf

    @property
    def limit_left_s(self) -> float | None:
        """Seconds of the limit; None without one. The scheduler's own is for each to ask."""
        return None if self._limit == math.inf else self._limit - time.monotonic()

    @property
    def in_time(self) -> bool:
        """Whether there is a limit, or may be."""
        return self._allocation is not None or self._limit_s < math.inf

    @property
    def end(self) -> float:
        """When everything has to be over; infinite if never."""
        return self._limit if self._allocation is None else min(self._limit, self._allocation.end)

    @property
    def _whole_s(self) -> float:
        """From when the end was known first."""
        own = self._allocation is None or self._limit <= self._allocation.end
        return self._limit_s if own or self._allocation is None else self._allocation.longest_s

    @property
    def lead_s(self) -> float:
        """How long before the end ranks are asked."""
        return min(self._wanted_s, self._whole_s / 2)

    @property
    def _wanted_s(self) -> float:
        usual = min(_LEAD_S if self._copying_s < 0 else _LEAST_S, _LEAD_SHARE * self._whole_s)
        return self._told_lead_s or max(usual, self._needed_s)

    @property
    def _needed_s(self) -> float:
        return _FACTOR * (max(0.0, self._saving_s) + max(0.0, self._copying_s))

    def measured(self, ranks: Sequence[RankProgress]) -> None:
        """How long saves took so far, as ranks tell; those of earlier starts too."""
        saving = max((one.saving_ms for one in ranks), default=-1)
        copying = max((one.copying_ms for one in ranks), default=-1)
        self._saving_s = saving / 1e3 if saving >= 0 else self._saving_s
        self._copying_s = copying / 1e3 if copying >= 0 else self._copying_s

    @property
    def spare_s(self) -> float:
        """How long before the end what is left is ended."""
        return min(_SPARE_S, self.lead_s / 4)

    @property
    def left_s(self) -> float:
        """Seconds that ranks may take from now."""
        return (
            max(0.0, self.end - self.spare_s - time.monotonic())
            if self.end < math.inf
            else math.inf
        )

    def wait_s(self) -> float:
        """Seconds until `look` is worth while."""
        return max(0.0, self._next - time.monotonic())

    def look(self, note: Callable[[str], object]) -> bool:
        """See whether the ranks are to end, and tell people by `note`; False if it is too early for that."""
        now = time.monotonic()
        if now < self._next:
            return False
        known = self._allocation is None or self._ask(self._allocation, now, note)
        if not self.why:
            if self.halts():
                note(f"note: {self.why}; the ranks are asked to save and end")
            elif known and now >= self.end - self.lead_s:
                self.why, self.asked_at = "its time was up", now
                note(f"note: {self.end - now:.0f} s are left; the ranks are asked to save and end")
        self._warn(note)
        events = (now + (_SOON_S if self.why or not known else _LOOK_S), *self._events())
        self._next = min(when for when in events if when > now)
        return True

    def halts(self) -> bool:
        """Whether the file is there."""
        try:
            uid = self._file.stat().st_uid
        except OSError:
            return False
        if not self.why:
            self.why, self.halted, self.asked_at = (
                f"{_name(uid)} asked by {self._file}",
                True,
                time.monotonic(),
            )
        return True

    def _events(self) -> tuple[float, ...]:
        end = self.end
        return () if end == math.inf else (end - self.lead_s, end - self.spare_s)

    def _ask(self, allocation: TimeLeft, now: float, note: Callable[[str], object]) -> bool:
        """Ask the scheduler if it is time; whether all is known that it will say."""
        if not allocation.answered(note):
            return False
        before = self.end - self.lead_s - _ASK_BEFORE_S if self.end < math.inf else math.inf
        late = now >= before > allocation.asked_at and not self.why
        if late or now - allocation.asked_at >= _ASK_AGAIN_S:
            allocation.ask()
            return False
        return True

    def _warn(self, note: Callable[[str], object]) -> None:
        if self.end < math.inf and self._wanted_s > self.lead_s and not self._warned:
            self._warned = True
            took = f"twice what it took to save and copy ({self._needed_s:.0f} s)"
            wanted = f"FIVEFOLD_END_S={self._told_lead_s:g}" if self._told_lead_s else took
            note(
                f"warning: {wanted} is more than half of {self._whole_s:.0f} s; "
                f"the ranks are asked to save {self.lead_s:.0f} s before the end"
            )

    def over(self) -> bool:
        """Whether what has not ended by now has to be ended."""
        return bool(self.why) and time.monotonic() >= self.end - self.spare_s

    def close(self) -> None:
        """Ask nobody any more."""
        if self._allocation is not None:
            self._allocation.close()


def limit_within(left_s: float | None) -> dict[str, str]:
    """What tells jobs within the processes that this one starts how much time they have."""
    return {} if left_s is None else {ENDS_AT: f"{os.getpid()}:{time.monotonic() + left_s:.3f}"}


def _end_around() -> float:
    """When a job around this one has to have ended; infinite if the variable is not of such a one."""
    told = re.fullmatch(r"(\d+):(\d+\.\d+)", os.environ.get(ENDS_AT, ""))
    pid = os.getpid()
    while told and pid > 1 and (found := process_stat(pid)) is not None:
        if pid == int(told[1]):
            return float(told[2])
        pid = found.parent
    return math.inf  # a rank has submitted this job, say


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
