"""Engines for several nodes: each starts an agent on every node of the job, once, and nothing else."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from fivefold.cluster.network import local_addresses
from fivefold.errors import UsageError
from fivefold.launch.agent_call import ADDRESSES, KEY
from fivefold.launch.agent_listener import AgentListener, AgentStart
from fivefold.launch.agent_watch import AgentWatch
from fivefold.launch.attend import attend
from fivefold.launch.helpers import narrowed, remote_shell
from fivefold.launch.job import Job, NodeRanks, Outcome, ProcessStart
from fivefold.launch.mpirun import MpirunEngine, find_mpirun, flavour
from fivefold.launch.restarts import restarting

__all__ = [
    "FluxEngine",
    "MpiNodesEngine",
    "NodeEngine",
    "PalsEngine",
    "SrunEngine",
    "SshEngine",
    "own_addresses",
]

_AGENT = ("-P", "-m", "fivefold.launch.agent")


class NodeEngine(ABC):
    """What all of them do. Subclasses say how agents are started."""

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot be used here; see `Engine.unavailable`."""

    @abstractmethod
    def starters(self, job: Job, addresses: Sequence[str], key: str) -> list[AgentStart]:
        """What starts the agents of `job`, and tells them `addresses` and `key` of the launcher."""

    def starts(self, job: Job, port: int) -> list[ProcessStart]:
        """What starts the agents; they start the ranks. See `Engine.starts`."""
        del port
        return [one.start for one in self.starters(job, ["HOST:PORT"], "KEY")]

    def run(self, job: Job) -> Outcome:
        """Run `job`; see `Engine.run`."""
        began = time.monotonic()
        job.make_log_dir()
        with (
            narrowed(job.helpers),
            AgentListener() as listener,
            AgentWatch(job, self.name, listener) as watch,
        ):
            attend(job, self.name, watch)
            watch.gather(self.starters(job, own_addresses(listener.port), listener.key.hex()))
            restarting(job, watch.run_ranks, watch.pause, watch.display.note, watch.progress)
        return Outcome(job.processes, time.monotonic() - began)


class OneProcessEngine(NodeEngine):
    """An engine that starts all agents in one process, whose environment tells them what they need."""

    options: ClassVar[tuple[str, ...]] = ()
    """of the agents"""

    @abstractmethod
    def command(self, hosts: Sequence[str]) -> list[str]:
        """The words before those of an agent that start one on each host.

        `ADDRESSES` and `KEY` of the environment have to reach it.
        """

    def starters(self, job: Job, addresses: Sequence[str], key: str) -> list[AgentStart]:
        """See `NodeEngine.starters`."""
        environ = _steady(os.environ) | {ADDRESSES: ",".join(addresses), KEY: key}
        hosts = [node.host for node in job.nodes]
        words = [*self.command(hosts), sys.executable, *_AGENT, *self.options]
        return [AgentStart(ProcessStart(words, environ), tuple(range(len(hosts))))]


def _steady(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that starts agents: without what steers a step of Slurm otherwise."""
    steering = ("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")
    return {k: v for k, v in environ.items() if not k.startswith(steering)}


def own_addresses(port: int) -> list[str]:
    """Where agents call: a port at all addresses of this node, its own loopback last."""
    found = [str(address) for address in local_addresses() if not address.is_loopback]
    return [f"{address}:{port}" for address in [*found, "127.0.0.1"]]


class SrunEngine(OneProcessEngine):
    """A step of this Slurm allocation, with all cores that it grants on each node."""

    name = "srun"

    def unavailable(self) -> str | None:
        """A reason outside of Slurm's allocations."""
        if not os.environ.get("SLURM_JOB_ID"):
            return "this is no allocation of Slurm; salloc or sbatch makes one"
        return None if shutil.which("srun") else "there is no srun on PATH"

    def command(self, hosts: Sequence[str]) -> list[str]:
        """See `OneProcessEngine.command`. Slurm passes the whole environment on."""
        count = str(len(hosts))
        return [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(hosts)}",
            "--cpu-bind=none",
            "--mpi=none",
            "--overlap",  # a shell of the allocation is a step too
            "--no-kill",  # a node that fails does not end the step
            "--kill-on-bad-exit=0",
            "--input=none",
            "--unbuffered",
        ]


class FluxEngine(OneProcessEngine):
    """A job of flux. Written against its documentation: it has not run under flux."""

    name = "flux"

    def unavailable(self) -> str | None:
        """A reason where there is no flux."""
        return None if shutil.which("flux") else "there is no flux on PATH"

    def command(self, hosts: Sequence[str]) -> list[str]:
        """See `OneProcessEngine.command`. Flux passes the whole environment on."""
        count = str(len(hosts))
        nodes = f"--requires=host:{','.join(hosts)}"
        return ["flux", "run", "-N", count, "-n", count, "--exclusive", nodes]


class PalsEngine(OneProcessEngine):
    """HPE's mpiexec. Written against its documentation: it has not run under PALS."""

    name = "pals"

    def unavailable(self) -> str | None:
        """A reason where PBS has started no job or there is no mpiexec."""
        if not os.environ.get("PBS_NODEFILE"):
            return "this is no job of PBS"
        return None if shutil.which("mpiexec") else "there is no mpiexec on PATH"

    def command(self, hosts: Sequence[str]) -> list[str]:
        """See `OneProcessEngine.command`. PALS passes the whole environment on."""
        where = ["--hosts", ",".join(hosts), "-n", str(len(hosts)), "--ppn", "1"]
        return ["mpiexec", *where, "--cpu-bind", "none", "--no-abort-on-failure"]


class MpiNodesEngine(OneProcessEngine):
    """Open MPI or MPICH start the agents; the ranks that these start know nothing of MPI."""

    name = "mpirun"
    options = ("--apart",)

    def unavailable(self) -> str | None:
        """As of `MpirunEngine`."""
        return MpirunEngine().unavailable()

    def command(self, hosts: Sequence[str]) -> list[str]:
        """See `OneProcessEngine.command`. MPICH passes the whole environment on."""
        mpirun = find_mpirun()
        count = str(len(hosts))
        if flavour(mpirun) == "mpich":
            return [str(mpirun), "-n", count, "-ppn", "1", "-hosts", ",".join(hosts)]
        options = ["--map-by", "ppr:1:node", "--bind-to", "none", "-n", count]
        options += ["--host", ",".join(f"{host}:1" for host in hosts)]
        if os.geteuid() == 0:  # in a container; Open MPI wants to be told that this is on purpose
            options.append("--allow-run-as-root")
        names = [ADDRESSES, KEY, *(name for name in ("PYTHONPATH",) if name in os.environ)]
        return [str(mpirun), *options, *(word for name in names for word in ("-x", name))]


class SshEngine(NodeEngine):
    """A remote shell for each node; the agent of this one needs none."""

    name = "ssh"

    def unavailable(self) -> str | None:
        """A reason if there is no remote shell."""
        try:
            remote_shell()
        except UsageError as problem:
            return str(problem)
        return None

    def starters(self, job: Job, addresses: Sequence[str], key: str) -> list[AgentStart]:
        """See `NodeEngine.starters`. The key goes through a pipe: a command line is for all to read."""
        starters: list[AgentStart] = []
        for number, node in enumerate(job.nodes):
            near = [one for one in addresses if one.startswith("127.")]
            told = ",".join(near or addresses if node.local else addresses)
            brief = f'{{"addresses":"{told}","key":"{key}"}}\n'.encode()
            # Nobody may sit there to be asked for a password.
            own = {} if node.local else {"SSH_ASKPASS_REQUIRE": "never"}
            start = ProcessStart(self._words(number, node), _steady(os.environ) | own)
            starters.append(AgentStart(start, (number,), brief))
        return starters

    def _words(self, number: int, node: NodeRanks) -> list[str]:
        agent = [*_AGENT, "--number", str(number)]
        python = node.python or sys.executable
        if node.local:
            return [python, *agent]
        path = os.environ.get("PYTHONPATH")
        env = ["env", f"PYTHONPATH={path}"] if path else []
        return [*remote_shell(), node.host, "exec " + shlex.join([*env, python, *agent])]
