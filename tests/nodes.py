r"""Real nodes on one machine: each with its own processes, disk, network interface and host name.

    with Nodes(4) as nodes:
        job = nodes.job([sys.executable, "train.py"])     # a rank on each, started as torchrun does
        nodes.kill(2)                                     # its processes and its disk are gone, at once
        assert job.wait() != [0, 0, 0, 0]
        nodes.replace(2)                                  # another host, empty
        job = nodes.job([sys.executable, "train.py"])

Nodes are namespaces of the kernel, which any user may make where the kernel is set up so:

    test ── hub: user, network (a bridge), mounts
             ├── node0: network (one end of a cable), processes, mounts (its disk), host name
             ├── node1
             ...

All see the same path `nodes.local`, a memory file system of each node's own, and the same files
elsewhere: `nodes.shared` is their parallel file system. A node lives as long as its process 1, which ends
with this process too, however that ends. A process ends its own node by SIGTERM to process 1 (the kernel
keeps SIGKILL from it).

Where the kernel refuses, `Nodes(4, apart=False)` stands in: directories and process groups. That is weaker:
one host name, one network, files that stay until they are removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from fivefold.launch.port import reserved_port
from namespaces import (
    Job,
    NodesError,
    Process,
    begun,
    call,
    end_of,
    entering,
    namespace,
)
from template import Order, Template

__all__ = ["Job", "Nodes", "Process", "refusal"]

MIB = 1 << 20
PORT = 29500
"""of the first job's store; every job gets the next, where nodes have networks of their own"""

_BOOT = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o size="$2",mode=700 local "$1/local"
mount -t tmpfs -o size=256m,mode=700 tmp "$1/tmp"
mount -t tmpfs -o size=1g,mode=1777 shm /dev/shm
mount --bind "$1/hosts" /etc/hosts
hostname "$3"
shift 3
exec "$@"
"""
_SHARED = """
set -e
mount -t tmpfs -o size="$2",mode=700 shared "$1"
shift 2
exec "$@"
"""
_TOOLS = ("unshare", "nsenter", "ip", "hostname", "mount")


@functools.cache
def refusal() -> str:
    """Why this machine makes no nodes, or nothing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    try:
        Nodes(2).close()
    except NodesError as problem:
        return str(problem)
    return ""


@dataclass
class _Node:
    """A node that is up."""

    host: str
    address: str
    disk: Path
    """its local storage, seen from here"""
    anchor: subprocess.Popen[bytes] | None
    """what made its process 1; None for one that is only a directory"""
    init: int | None
    processes: list[Process] = field(default_factory=list[Process])


class Nodes:
    """Some nodes and the file system that they share. A context manager that leaves nothing behind."""

    def __init__(
        self,
        count: int,
        disk_bytes: int = 256 * MIB,
        *,
        apart: bool = True,
        shared_bytes: int | None = None,
        template: Template | None = None,
        interfaces: int = 1,
    ) -> None:
        """`shared_bytes`: keep the shared folder in memory, of this size; it is then seen on nodes only.

        `template`: what scripts of Python are forked from. `interfaces`: of each node, eth0 and on, each with
        a network of its own; cables are those of the first.
        """
        self.apart = apart
        self._hubs = ["hub", *(f"hub{n}" for n in range(1, interfaces))]
        self._template = template
        self._disk_bytes = disk_bytes
        self._shared_bytes = shared_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="fivefold-nodes-"))
        self.shared, self.tmp = self._folder / "shared", self._folder / "tmp"
        for name in ("shared", "local", "tmp", "logs"):
            (self._folder / name).mkdir()
        hosts = "".join(
            f"10.5.0.{n}\tnode{n - 1}\n::ffff:10.5.0.{n}\tnode{n - 1}\n" for n in range(1, 251)
        )
        (self._folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n{hosts}")
        self._hub: subprocess.Popen[bytes] | None = None
        self._ports = contextlib.ExitStack()
        self._made = self._jobs = 0
        self._nodes: list[_Node | None] = []
        try:
            if apart:
                self._start_hub()
            self._nodes = [self._make() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._nodes)

    # --- what is where ---------------------------------------------------------------------------

    def local(self, node: int) -> Path:
        """The node's own disk, as its processes know it: one name on all nodes, if they are apart."""
        return self._folder / "local" if self.apart else self._up(node).disk

    def disk(self, node: int) -> Path:
        """The same, as this process can reach it: to look, and to damage."""
        return self._up(node).disk

    def host(self, node: int) -> str:
        """What the node calls itself."""
        return self._up(node).host

    def address(self, node: int) -> str:
        """Where other nodes reach it."""
        return self._up(node).address

    def alive(self, node: int) -> bool:
        """Whether it is up: it may have ended itself."""
        found = self._nodes[node]
        if found is None:
            return False
        return found.anchor is None or found.anchor.poll() is None

    def processes(self, node: int) -> list[int]:
        """Numbers of what runs on it, its process 1 not counted; none once it is down."""
        if (found := self._nodes[node]) is None:
            return []
        if found.init is None:
            started = [psutil.Process(p.pid) for p in found.processes if p.code is None]
            return [q.pid for p in started for q in (p, *p.children(recursive=True))]
        space = namespace(found.init)
        return [p for p in psutil.pids() if p != found.init and space and namespace(p) == space]

    # --- processes -------------------------------------------------------------------------------

    def start(
        self, node: int, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a process on a node; `env` is added to this process's variables."""
        up = self._up(node)
        log = self._folder / "logs" / f"{up.host}-{len(up.processes)}.log"
        log.touch()
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        if self.apart:
            environ["TMPDIR"] = str(self.tmp)  # of the node's own
        if self._template is not None and argv[0] == sys.executable and argv[1].endswith(".py"):
            order = Order(argv[1:], environ, str(self.shared), str(log), up.init)
            process = Process(self._template.start(order), log, entered=False)
        else:
            process = Process(self._popen(up, argv, environ, log), log, entered=self.apart)
        up.processes.append(process)
        return process

    def _popen(
        self, up: _Node, argv: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.shared)]
        if up.init is not None:
            enter = [*entering(up.init, *"npmu"), *enter]
        with log.open("wb") as out:
            return subprocess.Popen(
                [*enter, *argv],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def job(
        self,
        argv: Sequence[str],
        *,
        on: Sequence[int] | None = None,
        ranks_per_node: int = 1,
        env: Callable[[int], Mapping[str, str]] = lambda _: {},
        before: Mapping[int, Sequence[str]] | None = None,
    ) -> Job:
        """Start ranks on these nodes (on all), with torchrun's variables; ranks of a node are neighbours.

        `env(node)` gives more variables, `before[node]` stands before the command: a tracer, say.
        """
        nodes = list(range(len(self))) if on is None else list(on)
        self._jobs += 1
        ranks: list[Process] = []
        shared = {
            "WORLD_SIZE": str(len(nodes) * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_ADDR": self.address(nodes[0]),
            "MASTER_PORT": str(self._port()),
            "OMP_NUM_THREADS": "1",
        }
        for node in nodes:
            for local_rank in range(ranks_per_node):
                place = {"RANK": str(len(ranks)), "LOCAL_RANK": str(local_rank)}
                own = {"LOCAL": str(self.local(node)), "SHARED": str(self.shared)}
                whole = [*(before or {}).get(node, ()), *argv]
                ranks.append(self.start(node, whole, {**shared, **place, **own, **env(node)}))
        return Job(ranks)

    def _port(self) -> int:
        """Where the ranks of a job meet; on the network of all, it stays ours: rank 0 may bind it later."""
        return PORT + self._jobs if self.apart else self._ports.enter_context(reserved_port(None))

    def login(self) -> list[str]:
        """Words before a command that shall run beside the nodes, in their network, as on a login node."""
        assert self._hub is not None, "nodes that are not apart have no network"
        wires = "link set lo up\naddress replace 10.5.0.254/24 dev hub\n"
        call([*entering(self._hub.pid, "n"), "ip", "-batch", "-"], wires)
        return entering(self._hub.pid, "n", "m")

    def entry(self, node: int) -> list[str]:
        """Words before a command that shall run on a node, for a process beside the nodes."""
        return ["nsenter", "--target", str(self._up(node).init), "-n", "-p", "-m", "-u"]

    # --- faults ----------------------------------------------------------------------------------

    def kill(self, node: int, *, silently: bool = False) -> None:
        """End a node: processes, disk and network in one moment.

        Its kernel would still close its connections, as ours does: peers see that at once. `silently`, they
        see nothing, as when power or a switch fails.
        """
        up = self._up(node)
        if silently:
            self.cut(node)
        self._nodes[node] = None
        if up.init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(up.init, signal.SIGKILL)
        for process in up.processes:
            if up.init is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.reap()
        if up.anchor is not None:
            end_of(up.anchor)
        else:
            shutil.rmtree(up.disk)

    def replace(self, node: int) -> None:
        """Put a new host in the place of a node, which is killed if it is up: empty, with another name."""
        if self._nodes[node] is not None:
            self.kill(node)
        self._nodes[node] = self._make()

    def cut(self, node: int) -> None:
        """Pull the network cable of a node; it runs on."""
        self._cable(node, "down")

    def mend(self, node: int) -> None:
        """Put the cable back."""
        self._cable(node, "up")

    def close(self) -> None:
        """End all nodes and remove their files."""
        for node, up in enumerate(self._nodes):
            if up is not None:
                self.kill(node)
        if self._hub is not None:
            end_of(self._hub)
        self._ports.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- making nodes ----------------------------------------------------------------------------

    def _up(self, node: int) -> _Node:
        found = self._nodes[node]
        assert found is not None, f"node {node} is down"
        return found

    def _cable(self, node: int, state: str) -> None:
        assert self.apart and self._hub is not None, "nodes that are not apart have no cables"
        number = self._up(node).host.removeprefix("node")
        call([*entering(self._hub.pid, "n"), "ip", "link", "set", f"cable{number}", state])

    def _start_hub(self) -> None:
        space = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
        if self._shared_bytes is not None:
            space += ["sh", "-c", _SHARED, "shared", str(self.shared), str(self._shared_bytes)]
        self._hub, _ = begun(space, self._folder)
        # Else it is that of some cable, and changes when this one goes: for others it is gone for a while.
        bridges = "".join(
            f"link add {hub} address 02:05:00:00:0{n}:fe type bridge\nlink set {hub} up\n"
            for n, hub in enumerate(self._hubs)
        )
        call([*entering(self._hub.pid, "n"), "ip", "-batch", "-"], bridges)

    def _make(self) -> _Node:
        number, host = self._made, f"node{self._made}"
        self._made += 1
        if self._hub is None:
            disk = self._folder / "local" / host
            disk.mkdir()
            return _Node(host, "127.0.0.1", disk, None, None)
        space = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child"]
        boot = ["sh", "-c", _BOOT, "boot", str(self._folder), str(self._disk_bytes), host]
        anchor, init = begun([*entering(self._hub.pid, "n", "m"), *space, *boot], self._folder)
        address = f"10.5.0.{number + 1}"
        cables, own = "", "link set lo up\n"
        for n, hub in enumerate(self._hubs):
            cable = f"cable{number}" + (f"-{n}" if n else "")
            cables += f"link add {cable} type veth peer name eth{n} netns {init}\n"
            cables += f"link set {cable} master {hub} up\n"
            own += f"address add 10.{5 + n}.0.{number + 1}/24 dev eth{n}\nlink set eth{n} up\n"
        try:
            call([*entering(self._hub.pid, "n"), "ip", "-batch", "-"], cables)
            call([*entering(init, "n"), "ip", "-batch", "-"], own)
        except BaseException:
            end_of(anchor)
            raise
        return _Node(host, address, Path(f"/proc/{init}/root{self._folder}/local"), anchor, init)
