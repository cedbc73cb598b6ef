"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each node, in a folder of their own.

    with SlurmCluster(3) as cluster:
        subprocess.run(["salloc", "-N2", ...], env=CLEAN | cluster.environment)

Nodes n0, n1, ... share this machine's network, disks and host name. Everything ends with the block.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from waiting import awaited

__all__ = ["SlurmCluster", "refusal"]

_DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
SwitchType=switch/none
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@functools.cache
def refusal() -> str:
    """Why there is no Slurm here, or nothing."""
    missing = [name for name in (*_DAEMONS, "srun") if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)} here (on Debian: apt install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    try:
        with SlurmCluster(1):
            return ""
    except (OSError, AssertionError, subprocess.SubprocessError) as problem:
        return f"Slurm does not start here: {problem}"


class SlurmCluster:
    """Some nodes of one partition, `main`. A context manager that leaves nothing behind."""

    def __init__(self, nodes: int, cpus: int = 2) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fivefold-slurm-"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        ports = _free_ports(nodes + 1)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs={cpus}"
            for n in range(nodes)
        ]
        text = _CONFIG.format(
            host=host, user="root", folder=self._folder, port=ports[-1], nodes="\n".join(lines)
        )
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._nodes = nodes

    def __enter__(self) -> Self:
        folder = self._folder
        try:
            munge = [f"--{name}={folder}/munge.{end}" for name, end in _MUNGE]
            self._start("munged", ["munged", "--foreground", "--force", *munge])
            awaited((folder / "munge.sock").exists, "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-i", "-c"])
            for node in range(self._nodes):
                (folder / f"spool-n{node}").mkdir()
                self.start_node(node)
            awaited(self._all_idle, "all nodes of Slurm")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_node(self, node: int) -> None:
        """Start the slurmd of a node."""
        self._start(f"slurmd-n{node}", ["slurmd", "-D", "-N", f"n{node}"])

    def call(self, *words: str) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(
            words, env=self._environ(), capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError, AssertionError, subprocess.SubprocessError):
            self.call("scancel", "--user=root", "--signal=KILL", "--full")
            awaited(lambda: not self.call("squeue", "--noheader").strip(), "jobs to end")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_node(self, node: int) -> None:
        """End a node's slurmd and all that it has started, and tell Slurm, as a monitor would."""
        self._daemons[f"slurmd-n{node}"].kill()
        for pid in _steps(self._folder, node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.call("scontrol", "update", f"nodename=n{node}", "state=down", "reason=test")

    def ranks(self) -> list[int]:
        """Processes of steps on all nodes."""
        return [pid for node in range(self._nodes) for pid in _steps(self._folder, node)]

    def _environ(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "PATH": _PATH}

    def _start(self, name: str, words: Sequence[str]) -> None:
        with (self._folder / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self._environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _all_idle(self) -> bool:
        with contextlib.suppress(subprocess.SubprocessError):
            return (
                self.call("sinfo", "--noheader", "-N", "-o", "%T").split() == ["idle"] * self._nodes
            )
        return False


_MUNGE = (
    ("socket", "sock"),
    ("key-file", "key"),
    ("log-file", "log"),
    ("pid-file", "pid"),
    ("seed-file", "seed"),
)


def _steps(folder: Path, node: int) -> list[int]:
    """Processes of a node's steps: they know its name."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={folder}/slurm.conf".encode() in variables
            if ours and f"SLURMD_NODENAME=n{node}".encode() in variables:
                found.append(int(path.name))
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]
