"""`fivefold run --dry-run`: what would be run, as lines that a shell understands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from fivefold.launch.engine import Engine
from fivefold.launch.expectation import expectation
from fivefold.launch.explain import describe
from fivefold.launch.job import Job, Start
from fivefold.launch.placement import place
from fivefold.launch.port import reserved_port
from fivefold.launch.torch_facts import Probe

__all__ = ["script", "show"]


def show(job: Job, engine: Engine, *, report: bool) -> None:
    """Print the commands; with `report` the expected placement as well, to standard error."""
    with reserved_port(job.port) as port:
        starts = engine.starts(job, port)
    chosen = "" if job.port else f"; port {port} is free now, a run looks for one itself"
    count = f"{job.processes} process{'es' if job.processes > 1 else ''}"
    print(f"# engine {engine.name}, {count}, logs in {job.log_dir}{chosen}")
    print(script(starts, os.environ, str(job.log_dir)))
    if report:
        sys.stdout.flush()
        environ = job.rank_environment(engine.name)
        with Probe(environ) as probe:
            found = probe.answer()
            situation = expectation(job.processes, engine.name, environ, found, job.port)
        sys.stderr.write(describe(place(situation)))


def script(starts: list[Start], environ: Mapping[str, str], log_dir: str) -> str:
    """A script for a POSIX shell that starts the same processes from this environment, and waits for them."""
    lines = [f"mkdir -p {shlex.quote(log_dir)}"]
    for start in starts:
        told = start.environment
        words = ["env"]
        for name in sorted(environ.keys() - told.keys()):
            words += ["-u", name]
        words += [f"{k}={v}" for k, v in sorted(told.items()) if environ.get(k) != v]
        line = shlex.join([*words, *start.command])
        lines.append(f"{line} &" if len(starts) > 1 else line)
    return "\n".join([*lines, *["wait"] * (len(starts) > 1)])
