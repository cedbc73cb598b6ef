"""A command that needs more processes than it was started with starts itself again in N of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from fivefold.launch.helpers import Helpers
from fivefold.launch.job import Job, Outcome, default_log_dir
from fivefold.launch.local import LocalEngine

__all__ = ["launch_self"]


def launch_self(
    argv: Sequence[str],
    processes: int,
    *,
    output: Literal["prefix", "first"] = "first",
    log_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    helpers: Helpers | None = None,
) -> Outcome:
    """Run `fivefold ARGV` in `processes` ranks on this node and wait for them.

    The ranks find their place with `locate()`, whose launcher is then not "alone": that is how a
    command knows that it is one of them and must not start itself once more. Call this when nothing
    launched the process (`launched()` is false), and also for one process in an allocation of many,
    where `start` would ask whether srun was forgotten.

    Raises as `Engine.run` does; the command line turns that into a message and an exit code.
    """
    command = [sys.executable, "-m", "fivefold", *argv]
    job = Job(
        command,
        processes,
        log_dir if log_dir is not None else default_log_dir(),
        environment=dict(environment or {}),
        output=output,
        port=port,
        helpers=helpers,
    )
    return LocalEngine().run(job)
