"""A job whose ranks fail starts them again, if it may.

What is no mishap ends it at once: a user's mistake (code 2 after `error: ...`), a run that saved because a
signal asked (code 75), a signal to the launcher.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from fivefold.errors import LaunchError
from fivefold.launch.job import Job, Resumable, Stopped

__all__ = ["FinalFailure", "restarting"]

_LONGEST_PAUSE_S = 60.0


class FinalFailure(LaunchError):
    """Starting again would not help."""


def restarting(
    job: Job,
    start: Callable[[Job], None],
    pause: Callable[[float], None] = time.sleep,
    note: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
) -> None:
    """Run `start`, again with another folder of logs after each failure, `job.restarts` times at most.

    The first comes at once. Between others that end within a minute pauses grow, from 1 s to a minute: what
    is wrong may need time to pass. `pause` waits so many seconds, `note` tells people. Raises what the last
    start does, and `FinalFailure` at once.
    """
    pause_s = 0.0
    for number in range(job.restarts):
        began = time.monotonic()
        try:
            return start(_again(job, number))
        except (Resumable, Stopped, FinalFailure):
            raise
        except LaunchError as problem:
            quick = number and time.monotonic() - began < _LONGEST_PAUSE_S
            pause_s = min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S) if quick else 0.0
            when = f"in {pause_s:g} s" if pause_s else "now"
            note(f"warning: {problem}\nrestart {number + 1} of {job.restarts} {when}")
            pause(pause_s)
    return start(_again(job, job.restarts))


def _again(job: Job, number: int) -> Job:
    """The job as it is started for the `number`-th time after the first, with the restarts that are left."""
    if not number:
        return job
    folder = job.log_dir / f"restart-{number}"
    environment = {**job.environment, "FIVEFOLD_RESTART": str(number)}
    if environment.get("FIVEFOLD_TRACE") == str(job.log_dir.resolve() / "trace"):
        environment["FIVEFOLD_TRACE"] = str(folder.resolve() / "trace")
    this = replace(
        job,
        log_dir=folder,
        environment=environment,
        restarts=job.restarts - number,
    )
    this.make_log_dir()
    return this
