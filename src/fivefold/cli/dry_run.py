"""`fivefold run --dry-run`: what would be run, as lines that a shell understands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.engine import Engine
from fivefold.launch.expectation import expectation
from fivefold.launch.explain import describe
from fivefold.launch.helpers import Helper, Helpers, narrowed, remote_shell
from fivefold.launch.job import Job, ProcessStart
from fivefold.launch.placement import place
from fivefold.launch.port import reserved_port
from fivefold.launch.torch_facts import Probe
from fivefold.plan import Plan

__all__ = ["script", "show"]


def show(job: Job, engine: Engine, *, report: bool, plan: Plan | None = None) -> None:
    """Print the commands; with `report` the expected placement as well, to standard error.

    `plan`: what the commands write to the folder of the logs.
    """
    if job.nodes:
        _show_nodes(job, engine, report=report)
        return
    with reserved_port(job.port) as port, narrowed(job.helpers):
        starts = engine.starts(job, port)
    chosen = "" if job.port else f"; port {port} is free now, a run looks for one itself"
    count = f"{job.processes} process{'es' if job.processes > 1 else ''}"
    print(f"# engine {engine.name}, {count}, logs in {job.log_dir}{chosen}")
    print(script(starts, os.environ, job, plan))
    if report:
        sys.stdout.flush()
        environ = job.rank_environment(engine.name)
        with Probe(environ) as probe, narrowed(job.helpers):
            found = probe.answer()
            situation = expectation(job.processes, engine.name, environ, found, job.port)
        sys.stderr.write(describe(place(situation)))


def _show_nodes(job: Job, engine: Engine, *, report: bool) -> None:
    if report:
        raise UsageError(
            "--dry-run --explain tells of this node alone, and the job has several; leave --dry-run out"
        )
    print(f"# engine {engine.name}, {job.processes} processes on {len(job.nodes)} nodes")
    print("# agents, which call `fivefold run` and start what it says:")
    for start in engine.starts(job, 0):
        print(shlex.join(start.command))
    first = 0
    for node in job.nodes:
        what = f"ranks {first} to {first + node.ranks - 1}" if node.ranks else "stands by"
        print(f"# {node.host}: {what}")
        first += node.ranks
    print(f"# each rank:\n{shlex.join(job.command)}")


def script(
    starts: list[ProcessStart], environ: Mapping[str, str], job: Job, plan: Plan | None = None
) -> str:
    """A script for a POSIX shell that starts the same processes from this environment, and waits for them.

    Helpers get a key that the script makes itself, and end when the ranks have ended.
    """
    lines = [f"mkdir -p {shlex.quote(str(job.log_dir))}"]
    if plan is not None:
        file = shlex.quote(str(job.log_dir / "plan.toml"))
        lines.append(f"cat > {file} <<'END OF PLAN'\n{plan.to_toml()}END OF PLAN")
    if job.helpers is not None:
        lines += _helpers(job, job.helpers, environ)
    for start in starts:
        words = [*_on_cores(start.cores), *_changes(start.environment, environ), *start.command]
        line = shlex.join(words)
        lines.append(f'{line} & ranks="$ranks $!"' if len(starts) > 1 else line)
    if len(starts) > 1:
        lines.append("wait $ranks")
    return "\n".join(lines)


def _helpers(job: Job, helpers: Helpers, environ: Mapping[str, str]) -> list[str]:
    folder = shlex.quote(str(helpers.folder))
    lines = [
        "export FIVEFOLD_HELPER_KEY=$(openssl rand -hex 32)",
        f"mkdir -m 700 {folder}",
        f"trap 'kill $helpers 2> /dev/null || :; rm -r {folder}' EXIT",
    ]
    for helper in helpers.members:
        line = _local(job, helpers, helper, environ)
        if not helper.local:
            line = _remote(job, helpers, helper, environ)
        lines.append(f'{line} & helpers="$helpers $!"')
    cores = ",".join(map(str, helpers.trainer_cores))
    return [*lines, f"taskset -pc {cores} $$ > /dev/null"]


def _local(job: Job, helpers: Helpers, helper: Helper, environ: Mapping[str, str]) -> str:
    told = {**environ, **job.environment, **helpers.for_helper(helper)}
    words = [*_changes(told, environ), *helpers.command_of(helper)]
    return shlex.join([*_on_cores(helper.cores), *words])


def _on_cores(cores: Sequence[int]) -> list[str]:
    """The words that let a command run on these alone; on all if there are none."""
    return ["taskset", "-c", ",".join(map(str, cores))] if cores else []


def _remote(job: Job, helpers: Helpers, helper: Helper, environ: Mapping[str, str]) -> str:
    """Where a run tells the key through a pipe, this shows it to everybody on that host."""
    told = shlex.quote(" " + _local(job, helpers, helper, environ))
    there = f"cd {shlex.quote(str(Path.cwd()))} && exec env FIVEFOLD_HELPER_KEY="
    return f"{shlex.join([*remote_shell(environ), helper.host, there])}$FIVEFOLD_HELPER_KEY{told}"


def _changes(told: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The words that change one environment into the other. Keys of helpers are the script's."""
    words = ["env"]
    for name in sorted(environ.keys() - told.keys()):
        words += ["-u", name]
    changed = {k: v for k, v in told.items() if environ.get(k) != v and k != "FIVEFOLD_HELPER_KEY"}
    return [*words, *(f"{k}={v}" for k, v in sorted(changed.items()))]
