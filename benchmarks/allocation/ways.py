"""The ways to start ranks on the nodes of a site, and a run of one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contender import BenchmarkError

import mpis
from login_site import Site

__all__ = ["Way", "awaited", "fivefold", "ft_launcher", "mpirun", "running", "torchrun"]

LIMIT_S = 150.0
BESIDE = Path(sys.executable).parent
Commands = Callable[[Site, int, int, Sequence[str], Path], list[list[str]]]
"""of a site, nodes, ranks on each, a script's words and a folder: the commands, in the order of nodes"""


@dataclass(frozen=True)
class Way:
    """A way to start ranks: what is run where."""

    name: str
    ours: bool
    commands: Commands


def fivefold(*options: str, spares: int = 0) -> Commands:
    """`fivefold run` with options; `spares` more nodes stand by."""

    def commands(
        site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
    ) -> list[list[str]]:
        program = [str(BESIDE / "fivefold"), "run", "--log-dir", str(folder / "logs"), *options]
        if nodes == 1:
            return [[*program, "-n", str(ranks), *words]]
        hosts = ",".join(f"{site.name(node)}:{ranks}" for node in range(nodes + spares))
        given = ["-x", f"LOCAL={site.nodes.local(0)}", "--spares", str(spares), "-H", hosts]
        return [[*site.entering(folder), *program, *given, *words]]

    return commands


def torchrun(
    *options: str,
    spares: int | None = None,
    words_before: Sequence[str] = (str(BESIDE / "torchrun"),),
) -> Commands:
    """Its agents, one on each node, which meet on the first; elastic with `spares`: so many more wait.

    `words_before`: the command, or that of another launcher with its options.
    """

    def commands(
        site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
    ) -> list[list[str]]:
        program = [*words_before, f"--nproc-per-node={ranks}", *options]
        program.append("--monitor-interval=0.1")  # its default, 0.1 s, named
        if nodes == 1:
            return [[*program, "--standalone", *words]]
        program.append(f"--nnodes={nodes}")
        address = site.nodes.address(0)
        if spares is None:
            program += [f"--master-addr={address}", "--master-port=29400"]
        else:
            program += ["--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint={address}:29400"]
        found: list[list[str]] = []
        for node in range(nodes + (spares or 0)):
            place = [f"--node-rank={node}"] if spares is None else []
            enter = [*site.entering(folder), *site.nodes.entry(node)]
            found.append([*enter, *program, *place, *words])
        return found

    return commands


def ft_launcher(installed: Path) -> Sequence[str]:
    """That of nvidia-resiliency-ext, which is torchrun and more, from where it is installed."""
    path = f"PYTHONPATH={installed.resolve()}"
    return ("env", path, sys.executable, str(installed.resolve() / "bin" / "ft_launcher"))


def mpirun(
    site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
) -> list[list[str]]:
    """Open MPI."""
    meeting = "127.0.0.1" if nodes == 1 else site.nodes.address(0)
    variables = ["-x", "OMP_NUM_THREADS", "-x", "PATH"]
    command = [str(mpis.find("openmpi")), *mpis.options("openmpi"), *variables]
    command += ["-n", str(nodes * ranks)]
    before: list[str] = []
    if nodes > 1:
        hosts = ",".join(f"{site.name(node)}:{ranks}" for node in range(nodes))
        command += ["--host", hosts]
        before = site.entering(folder)
    given = ["env", f"MASTER_ADDR={meeting}", "MASTER_PORT=29400"]
    return [[*before, *command, *given, sys.executable, *words]]


class Running:
    """The processes of a run, by the numbers of their commands."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str]) -> None:
        """One more."""
        with (self._folder / "output").open("ab") as output:
            self._processes.append(
                subprocess.Popen(
                    command, cwd=self._folder, env=self._site.environ, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )
            )  # fmt: skip

    def wait(self) -> None:
        """Until all have ended by themselves."""
        for process in self._processes:
            process.wait(LIMIT_S)

    def end(self) -> None:
        """End all of them."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(LIMIT_S / 10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(LIMIT_S)


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], site: Site, folder: Path) -> Generator[Running]:
    """Run commands within the block; at its end they are ended."""
    started = Running(site, folder)
    try:
        for command in commands:
            started.start(command)
        yield started
    finally:
        started.end()


def awaited(done: Callable[[], bool], folder: Path, limit_s: float = LIMIT_S) -> None:
    """Wait until something is so. Raises `BenchmarkError` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            last = (folder / "output").read_text(errors="replace").splitlines()[-20:]
            raise BenchmarkError("ranks did not get there; last lines:\n" + "\n".join(last))
        time.sleep(0.005)
