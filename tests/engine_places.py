"""Where tests start commands on two nodes or more: beside real nodes, by each engine for several.

with place_of("ssh", folder) as place:
    command = ["fivefold", "run", *place.where, "script.py"]
    subprocess.run([*place.before(folder), *command], env=place.environ)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

import mpis
import slurm_cluster
import ssh_servers
from commands import CLEAN
from login_site import Site
from nodes import refusal
from slurm_cluster import SlurmCluster

__all__ = ["ENGINES", "SELDOM", "Place", "place_of"]

ENGINES = (
    "ssh",
    *(
        pytest.param(n, marks=pytest.mark.long)
        for n in ("forked", "sshd", "openmpi", "mpich", "srun")
    ),
)
"""parameters of a fixture: one engine is quick to test"""
SELDOM = (
    "ssh",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("forked", "openmpi", "mpich", "srun")),
)
"""the same for what the engines do not differ in: `make soak` tries them all"""


@dataclass
class Place:
    """Where the launcher of an engine runs, with nodes of two slots."""

    engine: str
    before: Callable[[Path], Sequence[str]]
    """words before the command"""
    environ: dict[str, str]
    hosts: Sequence[str]
    processes: Callable[[], list[int]]
    """what runs on the nodes"""
    lose: Callable[[int], None]
    """end a node, by its number"""
    options: Sequence[str] = ()
    own: Path | None = None
    """a folder of each node's own, and of the launcher's, under one path; None where nodes share all files"""
    disks: Sequence[Path] = ()
    """the same of each node, as it is seen from here"""

    def seen(self, folder: Path) -> list[Path]:
        """What is at `folder`, or `own`: for the launcher, and for each node."""
        return [folder, *(self.disks or [folder] * len(self.hosts))]

    def agents(self) -> list[int]:
        """The agents of nodes with ranks."""
        found: set[int] = set()
        for rank in map(psutil.Process, self.processes()):
            above = rank.parents()
            forked = any("launch.template" in word for word in above[0].cmdline())
            if forked or "RANK" in rank.environ():
                found |= {one.pid for one in above if "fivefold.launch.agent" in one.cmdline()[:4]}
        # Over mpirun, an agent has left the process that mpirun knows.
        return sorted(pid for pid in found if not found & {one.pid for one in _children(pid)})

    @property
    def where(self) -> list[str]:
        """Options that name engine and nodes; in an allocation of Slurm none are needed."""
        named = ["--engine", self.engine, "-H", ",".join(f"{host}:2" for host in self.hosts)]
        return [*(named if self.engine != "srun" else []), *self.options]


@contextlib.contextmanager
def place_of(name: str, folder: Path, nodes: int = 2) -> Generator[Place]:
    if name == "srun":
        if reason := slurm_cluster.refusal():
            pytest.skip(reason)
        with SlurmCluster(3) as cluster:
            environ = CLEAN | cluster.environment | {"OMP_NUM_THREADS": "1"}
            hosts = [f"n{node}" for node in range(nodes)]
            before = ["salloc", "--quiet", "--no-kill", f"--nodes={nodes}", "--ntasks-per-node=2"]
            before.append(f"--nodelist={','.join(hosts)}")
            yield Place(name, lambda _: before, environ, hosts, cluster.ranks, cluster.kill_node)
        return
    if reason := refusal():
        pytest.skip(reason)
    if name == "sshd" and (reason := ssh_servers.refusal()):
        pytest.skip(reason)
    with Site(nodes, folder) as site, contextlib.ExitStack() as calls:
        environ = site.environ
        processes = site.processes
        if name == "sshd":
            environ |= {"FIVEFOLD_RSH": calls.enter_context(ssh_servers.ssh_servers(site, folder))}
            processes = partial(_less_listeners, site)
        if name in ("openmpi", "mpich"):
            environ |= {"FIVEFOLD_MPIRUN": str(mpis.find(name))}
        engine = "mpirun" if name in ("openmpi", "mpich") else "ssh"
        options = ["--fork"] if name == "forked" else []
        hosts, own = [f"node{node}" for node in range(nodes)], site.nodes.local(0)
        disks = [site.nodes.disk(node) for node in range(nodes)]
        lose = site.nodes.kill
        yield Place(engine, site.entering, environ, hosts, processes, lose, options, own, disks)


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def _less_listeners(site: Site) -> list[int]:
    return [pid for pid in site.processes() if not ssh_servers.is_listener(pid)]
