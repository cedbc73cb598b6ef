"""`fivefold run`: a script in several processes."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from fivefold.cli import parse_options
from fivefold.cli.helpers import chosen_helpers
from fivefold.cli.nodes import chosen_hosts, nodes_of
from fivefold.errors import PlanError, UsageError, suggest
from fivefold.launch.engine import Engine, choose
from fivefold.launch.environment import launched, locate
from fivefold.launch.helpers import Helpers
from fivefold.launch.hosts import Host, Hosts, read_hostfile
from fivefold.launch.job import Job, NodeRanks, default_log_dir
from fivefold.launch.template import forkable

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
    hosts: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(aliases=["-H"], metavar="HOST:N,...", help_behavior_hint="(repeatable)"),
    ] = ()
    """nodes, and for how many processes each has room, such as a:4,b:4; default: those of the allocation"""
    hostfile: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """file of lines such as: node1 slots=4, or: dpu01 slots=4 role=helper cores=0-3 port=21001"""
    ppn: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """processes per node, whatever room it has"""
    spares: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")] = 0
    """so many of the last nodes stand by, for those that are lost; with --restarts"""
    restarts: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")] = 0
    """how often all processes start again after one has failed; default: never"""
    fork: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """import torch once on each node, in a process that is forked into all of the node's processes"""
    engine: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = "auto"
    """what starts them: auto (the default), local, torchrun or mpirun; on several nodes srun, ssh, flux,
    mpirun or pals"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """plan that fivefold.start() uses in every process"""
    layout: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...", help_behavior_hint="")] = None
    """layout that replaces that of the plan, such as data=2,height=2"""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="set", metavar="KEY=VALUE", help_behavior_hint="(repeatable)"),
    ] = ()
    """any value of the plan, such as tiles.fuse=never"""
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
        hosts = None if self.hostfile is None else read_hostfile(self.hostfile)
        self._check_surroundings()
        places = self._places(hosts)
        processes = self._processes(plan, places)
        nodes = nodes_of(places, processes, self.ppn, self.spares) if places else ()
        nodes, engine = self._engine(command, processes, nodes)
        log_dir = self.log_dir or default_log_dir()
        changed_plan = plan if self._changes_plan() else None
        if changed_plan is not None:
            environment["FIVEFOLD_PLAN"] = str(log_dir.resolve() / "plan.toml")
        if self.trace:
            environment["FIVEFOLD_TRACE"] = str(log_dir.resolve() / "trace")
        helpers = chosen_helpers(self.helpers, hosts, plan, command, environment)
        _check_helpers(helpers, nodes)
        if self.explain:
            from fivefold.launch.explain import wrapped

            command = wrapped(command, log_dir)
        job = Job(
            command,
            processes,
            log_dir,
            environment,
            port=self.port,
            helpers=helpers,
            nodes=nodes,
            restarts=self.restarts,
            fork=self.fork,
        )
        if self.dry_run:
            from fivefold.cli.dry_run import show

            show(job, engine, report=self.explain, plan=changed_plan)
        else:
            if changed_plan is not None:
                job.make_log_dir()
                changed_plan.save(log_dir / "plan.toml")
            engine.run(job)
            if self.trace:
                sys.stderr.write(f"recorded: fivefold report {log_dir}\n")
        return 0

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
        return changed(plan, self.layout, self.settings)

    def _changes_plan(self) -> bool:
        return self.layout is not None or bool(self.settings)

    def _engine(
        self, command: list[str], processes: int, nodes: tuple[NodeRanks, ...]
    ) -> tuple[tuple[NodeRanks, ...], Engine]:
        """What starts the processes, and the nodes whose agents it starts: with `--fork` this one, too."""
        if self.fork:
            self._check_forks(command, several_nodes=bool(nodes))
            if not nodes:
                here = NodeRanks(socket.gethostname(), processes, local=True)
                return (here,), choose("ssh", several_nodes=True, local=True)
        return nodes, choose(self.engine, several_nodes=bool(nodes))

    def _check_forks(self, command: list[str], *, several_nodes: bool) -> None:
        if self.explain:
            raise UsageError("--explain tells of ranks that start one by one; leave --fork out")
        if not several_nodes and self.engine not in ("auto", "local"):
            raise UsageError(
                f"--fork and --engine {self.engine}: on one node Fivefold forks itself"
            )
        if not forkable(command):
            raise UsageError(
                f"--fork is for Python scripts and modules, and {command[0]} is neither; leave it out"
            )

    def _places(self, hosts: Hosts | None) -> tuple[Host, ...]:
        """Hosts for the processes, as far as any are told."""
        if self.ppn is not None and self.ppn < 1:
            raise UsageError(f"--ppn {self.ppn}: at least 1 process is needed")
        named = self.hosts or (hosts is not None and hosts.trainers)
        if self.engine in ("local", "torchrun") and not named:
            return ()  # of an allocation, this node alone
        places = chosen_hosts(self.hosts, hosts)
        if not places and self.spares:
            raise UsageError(
                f"--spares {self.spares}: no hosts are known; name them with -H or --hostfile"
            )
        return places

    def _processes(self, plan: Plan | None, places: tuple[Host, ...]) -> int:
        """The number of processes; a plan that does not fit them ends here, not in every rank."""
        from fivefold.plan import AXES

        working = places[: len(places) - self.spares]
        slots = sum(self.ppn or place.slots for place in working) or self.ppn
        origins = [] if plan is None else [plan.origin(f"layout.{axis}") for axis in AXES]
        chosen = next((origin for origin in origins if origin.kind != "default"), None)
        if plan is None or chosen is None:
            return self.processes or slots or 1
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
        if self.engine != "auto":
            return
        if launched() and (place := locate()).world_size > 1:
            raise UsageError(
                f"{place.launcher} started {place.world_size} copies of this command, and each would start "
                "a job of its own; start the script itself that way, or call fivefold run only once "
                "(if several jobs are what you want: --engine local)"
            )


def _check_helpers(helpers: Helpers | None, nodes: tuple[NodeRanks, ...]) -> None:
    here = helpers is not None and any(helper.local for helper in helpers.members)
    if here and not all(node.local for node in nodes):
        raise UsageError(
            "helpers on this node serve ranks of this node only, and the job has several; name hosts that "
            "all nodes reach: --helpers dpu01:4"
        )


_FLAGS = ("-h", "--help", "--explain", "--dry-run", "--trace", "--fork")


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
