"""`fivefold run`: a script in several processes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from fivefold.cli import parse_options
from fivefold.cli.helpers import chosen_helpers
from fivefold.cli.instances import environment_of, nodes_for, with_instances
from fivefold.cli.nodes import IN_LINE, RestartOptions
from fivefold.errors import PlanError, UsageError, suggest
from fivefold.launch.ending import Ending
from fivefold.launch.engine import Engine
from fivefold.launch.environment import launched, locate
from fivefold.launch.job import Job, default_log_dir
from fivefold.launch.shrinking import Shrinking, fitted

if TYPE_CHECKING:
    from fivefold.plan import Plan

__all__ = ["Run", "resolve", "split"]


@dataclass(frozen=True)
class Run:
    """Start a script in several processes: a .py file, an executable, or -m MODULE.

    Options end at the script; what follows belongs to it.

    Example: fivefold run -n 2 train.py --epochs 3
    """

    processes: Annotated[
        int | None, tyro.conf.arg(aliases=["-n", "-np"], metavar="N", help_behavior_hint="")
    ] = None
    """number of processes; default: as many as the layout needs, or the hosts have room for, or 1"""
    helpers: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="HOST:N", help_behavior_hint="(repeatable)"),
    ] = ()
    """helpers to start beside the processes, such as local:2 for two on this node's last cores, or dpu01:4"""
    min_nodes: Annotated[int | None, tyro.conf.arg(metavar="M", help_behavior_hint="")] = None
    """go on with fewer replicas where nodes are lost and no spare is left, on M nodes at least"""
    smaller_plan: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(repeatable)"),
    ] = ()
    """plan for fewer processes, whose layout is used where so many are left; with --min-nodes"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """plan that fivefold.start() uses in every process"""
    layout: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...", help_behavior_hint="")] = None
    """layout that replaces that of the plan, such as data=2,height=2"""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="set", metavar="KEY=VALUE", help_behavior_hint="(repeatable)"),
    ] = ()
    """any value of the plan, such as tiles.fuse=never"""
    instances: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint="")] = None
    """processes on each GPU, or on each node without any, with cores of their own; they multiply the data
    axis of the layout, not the batch"""
    port: Annotated[int | None, tyro.conf.arg(metavar="PORT", help_behavior_hint="")] = None
    """TCP port where the processes meet; default: a free one"""
    log_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """where the output of each rank is kept; default: fivefold-logs/DATE-TIME-PID"""
    environment: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(aliases=["-x"], metavar="NAME=VALUE", help_behavior_hint="(repeatable)"),
    ] = ()
    """environment variable for every process; a NAME alone passes the current value on"""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """report where the ranks run and with what, and what is wrong with that, before the script starts"""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """print the commands that would be run, and run nothing"""
    trace: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """record where the time goes, for `fivefold report`, into the folder trace beside the logs"""
    nodes: Annotated[RestartOptions, IN_LINE] = field(default_factory=RestartOptions)
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Run:
        """Read our options up to the script, and leave the rest to it."""
        options, command = split(words)
        parsed = cast(Run, parse_options(cls, options, "run"))
        return replace(parsed, command=tuple(command))

    def run(self) -> int:
        """Start the processes and wait for them."""
        if self.processes is not None and self.processes < 1:
            raise UsageError(f"-n {self.processes}: at least 1 process is needed")
        command = resolve(self.command)
        environment = dict(_setting(text) for text in self.environment)
        plan = self._told_plan(environment)
        self._check_surroundings()
        self._check_explain()
        hosts = self.nodes.hosts_told()
        nodes = nodes_for(self.nodes, plan, self.processes, hosts)
        processes = self._processes(plan, nodes.room(hosts))
        environment |= environment_of(plan, processes)
        log_dir = self.log_dir or default_log_dir()
        ending = self.nodes.ending(log_dir)
        if self.nodes.requeue and any(log_dir.glob("rank-*.log")):  # of the start before
            log_dir = log_dir / f"requeued-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        changed_plan = plan if self._changes_plan() else None
        if changed_plan is not None:
            environment["FIVEFOLD_PLAN"] = str(log_dir.resolve() / "plan.toml")
        if self.trace:
            environment["FIVEFOLD_TRACE"] = str(log_dir.resolve() / "trace")
        helpers = chosen_helpers(self.helpers, hosts, plan, command, environment)
        if self.explain:
            from fivefold.launch.explain import wrapped

            command = wrapped(command, log_dir)
        job, engine = nodes.job(
            hosts, command, processes, log_dir, environment,
            output="prefix", port=self.port, helpers=helpers,
        )  # fmt: skip
        job = replace(job, shrinking=self._shrinking(plan, job), explains=self.explain)
        if self.dry_run:
            from fivefold.cli.dry_run import show

            show(job, engine, report=self.explain, plan=changed_plan)
        else:
            if changed_plan is not None:
                job.make_log_dir()
                changed_plan.save(log_dir / "plan.toml")
            return self._start(engine, job, ending)
        return 0

    def _check_explain(self) -> None:
        if self.explain and self.nodes.fork:
            raise UsageError("--explain tells of ranks that start one by one; leave --fork out")
        if self.explain and self.nodes.stage:
            raise UsageError(
                "--explain tells of ranks that import from where it is; leave --stage out"
            )

    def _start(self, engine: Engine, job: Job, ending: Ending) -> int:
        code = self.nodes.carry_out(engine, job, ending)
        if self.trace and not code:
            sys.stderr.write(f"recorded: fivefold report {job.log_dir}\n")
        return code

    def _told_plan(self, environment: dict[str, str]) -> Plan | None:
        """The plan of `--plan`, or else of FIVEFOLD_PLAN, with the changes of `--layout` and `--set`."""
        path = self.plan or environment.get("FIVEFOLD_PLAN") or os.environ.get("FIVEFOLD_PLAN")
        if not path and not self._changes_plan():
            return None
        from fivefold.cli.settings import changed
        from fivefold.plan import Plan

        if path:
            environment["FIVEFOLD_PLAN"] = str(Path(path).resolve())
        plan = Plan.load(path) if path else Plan()
        return with_instances(changed(plan, self.layout, self.settings), self.instances)

    def _changes_plan(self) -> bool:
        return self.layout is not None or self.instances is not None or bool(self.settings)

    def _shrinking(self, plan: Plan | None, job: Job) -> Shrinking | None:
        if self.min_nodes is None:
            if self.smaller_plan:
                raise UsageError(
                    "--smaller-plan is for jobs that may lose nodes: add --min-nodes M"
                )
            return None
        working = sum(bool(node.ranks) for node in job.nodes)
        if self.min_nodes > working:
            raise UsageError(
                f"--min-nodes {self.min_nodes}: the job has "
                + (f"{working} to begin with" if working else "no nodes but this one")
            )
        from fivefold.plan import Plan

        if not job.restarts:
            raise UsageError("--min-nodes is for jobs that start again: add --restarts N")
        scheme = "auto" if plan is None else plan.checkpoint.scheme
        if scheme != "auto":
            from fivefold.checkpoint.schemes import scheme_named

            if self.min_nodes < (least := scheme_named(scheme).least):
                raise UsageError(
                    f"--min-nodes {self.min_nodes}: checkpoint.scheme = {scheme!r} of the plan needs {least} "
                    'nodes; allow no fewer, or leave the scheme to the nodes that are left by "auto"'
                )
        smaller = fitted(plan or Plan(), self.smaller_plan) if self.smaller_plan else ()
        return Shrinking(self.min_nodes, plan, smaller)

    def _processes(self, plan: Plan | None, room: int) -> int:
        """The number of processes; a plan that does not fit them ends here, not in every rank."""
        from fivefold.plan import AXES

        origins = [] if plan is None else [plan.origin(f"layout.{axis}") for axis in AXES]
        chosen = next((origin for origin in origins if origin.kind != "default"), None)
        if plan is None or chosen is None:
            return self.processes or room or 1
        layout = plan.layout
        if self.processes not in (None, layout.size):
            by_option = chosen.reason in ("--layout", "--set")
            whose = f"of {chosen.reason}" if by_option else f"in {self.plan or 'FIVEFOLD_PLAN'}"
            raise PlanError(
                f"the layout {layout} {whose} needs {layout.size} processes, not {self.processes}; "
                "leave -n out, or change the layout"
            )
        return layout.size

    def _check_surroundings(self) -> None:
        if self.nodes.engine != "auto":
            return
        if launched() and (place := locate()).world_size > 1:
            raise UsageError(
                f"{place.launcher} started {place.world_size} copies of this command, and each would start "
                "a job of its own; start the script itself that way, or call fivefold run only once "
                "(if several jobs are what you want: --engine local)"
            )


_FLAGS = ("-h", "--help", "--explain", "--dry-run", "--trace", "--fork", "--stage", "--requeue")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: it begins at the first word that is no option, at -m or after --."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), list(words[at + 1 :])
        if not word.startswith("-") or word == "-m":
            break
        # Every other option takes one value.
        at += 1 if word.replace("_", "-") in _FLAGS or "=" in word else 2
    return list(words[:at]), list(words[at:])


def resolve(command: Sequence[str]) -> list[str]:
    """The command as the system wants it. Raises `UsageError` if there is nothing to start."""
    if not command:
        raise UsageError("no script given; for example: fivefold run -n 2 train.py")
    script, *arguments = command
    if script == "-m":
        return [sys.executable, "-m", *_checked_module(arguments)]
    path = Path(script)
    if path.is_file():
        if path.suffix == ".py":
            return [sys.executable, script, *arguments]
        if os.access(path, os.X_OK):
            # Not resolved: a virtual environment's python is a link, and finds its packages by its own place.
            return [str(path.absolute()), *arguments]
        raise UsageError(f"{script} is neither a .py file nor executable; chmod +x {script}")
    if path.is_dir():
        raise UsageError(f"{script} is a folder, not a script")
    if os.sep not in script and (found := shutil.which(script)):
        return [found, *arguments]
    raise UsageError(f"there is no script {script}{_near(path)}")


def _near(path: Path) -> str:
    try:
        beside = sorted(p.name for p in path.parent.iterdir() if p.suffix == ".py")
    except OSError:
        return f"; there is no folder {path.parent} either"
    return (
        suggest(path.name, beside[:20])
        if beside
        else f"; {path.parent.resolve()} holds no .py file"
    )


def _checked_module(arguments: list[str]) -> list[str]:
    if not arguments:
        raise UsageError("-m needs a module, for example: fivefold run -n 2 -m package.train")
    top = arguments[0].partition(".")[0]
    if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None and top not in _BUILT_IN:
        raise UsageError(f"there is no module {top}; is it installed, or its folder on PYTHONPATH?")
    return arguments


_BUILT_IN = sys.builtin_module_names


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise UsageError(f"-x {text}: expected NAME=VALUE, or the NAME of a variable to pass on")
    if not equals and name not in os.environ:
        raise UsageError(f"-x {text}: {name} is not set; give it a value with -x {name}=VALUE")
    return name, value if equals else os.environ[name]
