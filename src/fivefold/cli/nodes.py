"""On which nodes a command runs its ranks, and what starts them: the same options for all commands.

class Train:
    nodes: Annotated[RestartOptions, IN_LINE] = RestartOptions()

hosts = options.nodes.hosts_told()             what the options say, else what the allocation says
job, engine = options.nodes.job(hosts, ...)
engine.run(job)
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fivefold.errors import UsageError
from fivefold.launch.allocation import allocated
from fivefold.launch.duration import seconds_of
from fivefold.launch.ending import JOBS, Ending
from fivefold.launch.engine import Engine, choose
from fivefold.launch.environment import locate
from fivefold.launch.helpers import Helpers
from fivefold.launch.hosts import (
    LOCAL,
    Host,
    Hosts,
    parse_hosts,
    reachable,
    read_hostfile,
    spread,
)
from fivefold.launch.job import Job, NodeRanks, Resumable
from fivefold.launch.slurm import requeue
from fivefold.launch.template import forkable

__all__ = ["IN_LINE", "NodeOptions", "RestartOptions", "chosen_hosts", "nodes_of"]

IN_LINE = tyro.conf.arg(name="")
"""for the field of a command: its options are options of the command"""


def _option(metavar: str, *aliases: str, hint: str = "") -> object:
    return tyro.conf.arg(metavar=metavar, aliases=aliases, help_behavior_hint=hint)


@dataclass(frozen=True)
class NodeOptions:
    """Where the processes of a command run."""

    hosts: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        _option("HOST:N,...", "-H", hint="(repeatable)"),
    ] = ()
    """nodes, and for how many processes each has room, such as a:4,b:4; default: those of the allocation"""
    hostfile: Annotated[Path | None, _option("FILE")] = None
    """file of lines such as: node1 slots=4, or: dpu01 slots=4 role=helper cores=0-3 port=21001"""
    ppn: Annotated[int | None, _option("N")] = None
    """processes per node, whatever room it has"""
    fork: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """import torch once on each node, in a process that is forked into all of the node's processes"""
    stage: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """import from copies of environment and script on each node, which are sent once, from node to node"""
    engine: Annotated[str, _option("NAME")] = "auto"
    """what starts them: auto (the default), local, torchrun or mpirun; on several nodes srun, ssh, flux,
    mpirun or pals"""

    def hosts_told(self) -> Hosts:
        """The hosts that the options name, for ranks without any those of the allocation.

        None for ranks if this node alone is meant. Raises `UsageError` for what cannot be read.
        """
        if self.ppn is not None and self.ppn < 1:
            raise UsageError(f"--ppn {self.ppn}: at least 1 process is needed")
        hosts = Hosts() if self.hostfile is None else read_hostfile(self.hostfile)
        if self.engine in ("local", "torchrun") and not (self.hosts or hosts.trainers):
            return hosts
        return replace(hosts, trainers=chosen_hosts(self.hosts, hosts))

    def standing_by(self) -> int:
        """How many of the last hosts have no ranks at first."""
        return 0

    def room(self, hosts: Hosts) -> int:
        """For how many ranks the hosts have room; 0 if nothing tells."""
        working = hosts.trainers[: len(hosts.trainers) - self.standing_by()]
        return sum(self.ppn or host.slots for host in working) or self.ppn or 0

    def chosen_nodes(self, hosts: Hosts, processes: int) -> tuple[NodeRanks, ...]:
        """How many ranks run on each host; empty if all run on this node alone. Raises as `nodes_of`."""
        spares = self.standing_by()
        if spares and not hosts.trainers:
            raise UsageError(
                f"--spares {spares}: no hosts are known; name them with -H or --hostfile"
            )
        return nodes_of(hosts.trainers, processes, self.ppn, spares) if hosts.trainers else ()

    def job(
        self,
        hosts: Hosts,
        command: Sequence[str],
        processes: int,
        log_dir: Path,
        environment: Mapping[str, str],
        *,
        output: Literal["prefix", "first"] = "first",
        port: int | None = None,
        helpers: Helpers | None = None,
    ) -> tuple[Job, Engine]:
        """The job of a command, and what runs it. Raises `UsageError` if they do not go together."""
        nodes = self.chosen_nodes(hosts, processes)
        several = bool(nodes)
        by_agent = (self.fork or self.stage) and not several
        self._check_agents(command, nodes)
        if by_agent:  # that of this node forks ranks, and holds copies
            nodes = (NodeRanks(socket.gethostname(), processes, local=True),)
            engine = choose("ssh", several_nodes=True, local=True)
        else:
            engine = choose(self.engine, several_nodes=several)
        _check_helpers(helpers, nodes)
        job = Job(
            command,
            processes,
            log_dir,
            environment,
            output=output,
            port=port,
            helpers=helpers,
            nodes=nodes,
            fork=self.fork,
            stage=self.stage,
        )
        return self.lasting(job), engine

    def lasting(self, job: Job) -> Job:
        """The job with what is to happen when ranks fail: nothing but its end."""
        return job

    def words(self) -> list[str]:
        """The same options as words, for `fivefold run`."""
        return [
            *(word for host in self.hosts for word in ("-H", host)),
            *(["--hostfile", str(self.hostfile)] if self.hostfile else []),
            *(["--ppn", str(self.ppn)] if self.ppn else []),
            *(["--fork"] if self.fork else []),
            *(["--stage"] if self.stage else []),
            *["--engine", self.engine],
        ]

    def refuse_when_launched(self) -> None:
        """Raise `UsageError` if somebody else than Fivefold has started this rank: it starts no others."""
        given = self != type(self)()
        if given and not os.environ.get("FIVEFOLD_ENGINE"):
            raise UsageError(
                f"{locate().launcher} started this process, so Fivefold does not choose where ranks run: "
                "leave -H, --engine and their like out, or start one fivefold alone"
            )

    def _check_agents(self, command: Sequence[str], nodes: Sequence[NodeRanks]) -> None:
        option = "--fork" if self.fork else "--stage" if self.stage else ""
        if option and not nodes and self.engine not in ("auto", "local"):
            raise UsageError(
                f"{option} and --engine {self.engine}: on one node Fivefold starts the ranks itself"
            )
        if self.fork and not forkable(command):
            raise UsageError(
                f"--fork is for Python scripts and modules, and {command[0]} is neither; leave it out"
            )
        if self.stage and any(node.python for node in nodes):
            raise UsageError(
                "--stage sends this environment to all nodes, and the host file names another Python for "
                "some: leave python= or --stage out"
            )


@dataclass(frozen=True)
class RestartOptions(NodeOptions):
    """The same for commands whose processes may start again."""

    spares: Annotated[int, _option("N")] = 0
    """so many of the last nodes stand by, for those that are lost; with --restarts"""
    restarts: Annotated[int, _option("N")] = 0
    """how often all processes start again after one has failed; default: never"""
    stall: Annotated[str, _option("TIME")] = "0"
    """no step, and no other sign of life, for so long is a failure, such as 10min; default: never"""
    time_limit: Annotated[str, _option("TIME")] = ""
    """time after which the run has to have saved and ended, such as 90m; default: what the scheduler says"""
    requeue: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """have Slurm queue the job again when the run has saved and ended because its time was up"""

    def standing_by(self) -> int:
        """See `NodeOptions`."""
        return self.spares

    def lasting(self, job: Job) -> Job:
        """See `NodeOptions`: it starts again, and what stands still has failed."""
        return replace(job, restarts=self.restarts, stall_s=seconds_of("--stall", self.stall))

    def ending(self, log_dir: Path) -> Ending:
        """When the run has to end, by these options, by the scheduler, or by the file `halt` in `log_dir`."""
        if self.requeue and not os.environ.get("SLURM_JOB_ID"):
            raise UsageError(
                "--requeue is for jobs of Slurm, and this is none; elsewhere the batch script submits the "
                "job again after exit code 75"
            )
        if not self.time_limit and not any(map(os.environ.get, JOBS)):
            return Ending(log_dir)
        from fivefold.launch.time_left import TimeLeft, duration_s, schedulers

        limit_s = duration_s("--time-limit", self.time_limit) if self.time_limit else math.inf
        return Ending(log_dir, limit_s, TimeLeft(schedulers()))

    def carry_out(self, engine: Engine, job: Job, ending: Ending) -> int:
        """Run the job; 0, or 75 where Slurm has been asked to queue it again. Raises as `Engine.run`."""
        with ending:
            try:
                engine.run(replace(job, ending=ending))
            except Resumable as saved:
                if not self.requeue or not ending.why or ending.halted or ending.halts():
                    raise
                sys.stderr.write(f"note: {saved}\n")  # before Slurm ends this job
                _requeue()
                return saved.exit_code
        return 0


def _requeue() -> None:
    if problem := requeue():
        sys.stderr.write(
            f"warning: Slurm does not queue the job again: {problem}; it does so with batch jobs that may be "
            "requeued (sbatch --requeue); submit this one again, and it goes on\n"
        )
        return
    sys.stderr.write("note: Slurm queues the job again\n")


def chosen_hosts(
    options: Sequence[str], hostfile: Hosts | None, environ: Mapping[str, str] = os.environ
) -> tuple[Host, ...]:
    """The hosts of `-H`, else of the host file, else of the allocation; empty if nothing tells any.

    Raises `UsageError` for what cannot be read.
    """
    if options:
        if hostfile is not None and hostfile.trainers:
            raise UsageError(
                "-H and the host file both name hosts for ranks; leave one of them out"
            )
        return parse_hosts(",".join(options))
    if hostfile is not None and hostfile.trainers:
        return hostfile.trainers
    return allocated(environ)


def nodes_of(
    hosts: Sequence[Host], processes: int | None, per_node: int | None, spares: int
) -> tuple[NodeRanks, ...]:
    """How many ranks run on each host; the last `spares` stand by. Empty if all run on this node alone.

    Raises `UsageError` if there are too few hosts or slots.
    """
    if not 0 <= spares < max(1, len(hosts)):
        raise UsageError(
            f"--spares {spares}: {len(hosts)} hosts are known, and at least one of them has to work"
        )
    working, standing_by = hosts[: len(hosts) - spares], hosts[len(hosts) - spares :]
    counts = spread(working, processes, per_node)
    nodes = [_node(host, ranks) for host, ranks in zip(working, counts, strict=True) if ranks]
    if all(node.local and not node.cores for node in nodes) and not spares:
        return ()
    return (*nodes, *(_node(host, 0) for host in standing_by))


def _node(host: Host, ranks: int) -> NodeRanks:
    return NodeRanks(reachable(host), ranks, host.cores, host.python, host.host == LOCAL)


def _check_helpers(helpers: Helpers | None, nodes: Sequence[NodeRanks]) -> None:
    here = helpers is not None and any(helper.local for helper in helpers.members)
    if here and not all(node.local for node in nodes):
        raise UsageError(
            "helpers on this node serve ranks of this node only, and the job has several; name hosts that "
            "all nodes reach: --helpers dpu01:4"
        )
