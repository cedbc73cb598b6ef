"""The processes of contenders: all exist at once, one communicates while the others are blocked."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from fivefold.closing import Closing
from fivefold.errors import FivefoldError, UsageError
from fivefold.launch.job import NodeRanks
from fivefold.launch.mpirun import flavour
from fivefold.launch.node_engines import own_addresses
from fivefold.launch.port import reserved_port
from fivefold.wire import Listener, Protocol, new_key

__all__ = [
    "CONTENDERS",
    "KEY",
    "PROTOCOL",
    "BenchError",
    "Contender",
    "begun",
    "mpi_of",
    "mpi_options",
    "mpirun_of",
]

KEY = "FIVEFOLD_BENCH_KEY"
PROTOCOL = Protocol("fivefoldbench", "001")

CONTENDERS: Mapping[str, str] = {
    "fivefold": "Fivefold",
    "fivefold-arena": "Fivefold, tensors in the arena",
    "fivefold-direct": "Fivefold, small sums straight between nodes",
    "fivefold-doubling": "Fivefold, small sums by doubling",
    "fivefold-openmpi": "Fivefold, carried by Open MPI",
    "fivefold-mpich": "Fivefold, carried by MPICH",
    "gloo": "gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
}
"""What can be measured, and how it is called."""

_START_LIMIT_S = 120.0
_PATIENCE_S = 1.0
_MOST_CALLERS, _OF_ONE = 1024, 256
_ANSWER_LIMIT_S = 300.0
_STOP_LIMIT_S = 5.0


class BenchError(FivefoldError):
    """A contender did not start, or ended; the message ends with what it wrote last."""


@dataclass
class Contender(Closing):
    """Running ranks that answer requests. A context manager that leaves none behind."""

    name: str
    ranks: int
    processes: list[subprocess.Popen[bytes]]
    wires: list[IO[str]]
    """to each rank, in the order of ranks; none before `meet`"""
    log: Path
    door: _Door
    """where they call first"""

    def meet(self) -> Self:
        """Wait for the ranks that `begun` has started; they all end if one does not come.

        Raises `BenchError` then.
        """
        try:
            self.wires = _met(self.door, self)
        except BaseException:
            self.close()
            raise
        self.door.close()
        return self

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of all ranks. Raises `BenchError` when one ends, or takes minutes."""
        text = json.dumps(request)
        for wire in self.wires:
            print(text, file=wire, flush=True)
        answers: list[dict[str, Any]] = []
        for rank, wire in enumerate(self.wires):
            try:
                line = wire.readline()
            except TimeoutError:
                line = ""
            if not line:
                raise self._failed(f"rank {rank} of {self.name} gave no answer to {text}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """End the ranks: they leave when their sockets close."""
        for wire in self.wires:
            wire.close()
        self.door.close()
        for process in self.processes:
            try:
                process.wait(_STOP_LIMIT_S if self.wires else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _failed(self, what: str) -> BenchError:
        told = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return BenchError("\n".join([what, *told]))


def begun(
    name: str,
    ranks: int,
    folder: Path,
    script: Sequence[str] = (),
    *,
    nodes: Sequence[NodeRanks] = (),
    options: Sequence[str] = (),
    launcher: Sequence[str] = (),
) -> Contender:
    """Start the ranks of a contender, of which `Contender.meet` waits; `folder` takes its log and socket.

    `script` is the command of another benchmark, to be started instead of the worker; it is given the socket.
    `launcher` is what starts all of its ranks, if they are not to be started one by one.
    `nodes` are those of the ranks, if that is not this one alone, and `options` those of `fivefold run` that
    say the same. Raises `UsageError` if the contender is not installed.
    """
    door = _Door(folder, several_nodes=bool(nodes))
    contender = Contender(name, ranks, [], [], folder / f"{name}.log", door)
    words = [*script, door.address]
    try:
        if launcher:
            commands = [([*launcher, *words], dict[str, str]())]
        elif not nodes:
            commands = _commands(name, ranks, words, door.port)
        else:
            commands = [_on_nodes(name, nodes, words[-1], folder, options)]
        for command, environment in commands:
            told = environment | door.environment
            contender.processes.append(_spawned(command, told, contender.log))
    except BaseException:
        contender.close()
        raise
    return contender


class _Door(Closing):
    """Where ranks call: a socket of this node; for several nodes a port, where they prove to know a key."""

    def __init__(self, folder: Path, *, several_nodes: bool) -> None:
        self.environment: dict[str, str] = {}
        """for the ranks"""
        self._held = ExitStack()
        self.port = self._held.enter_context(reserved_port(None))
        """free for ranks that meet by torch, until this is closed"""
        self._lines = queue.SimpleQueue[socket.socket]()
        self._listener: Listener | None = None
        if several_nodes:
            key = new_key()
            self._socket = socket.create_server(("", 0), backlog=4096)
            self.address = ",".join(own_addresses(self._socket.getsockname()[1]))
            self.environment = {KEY: key.hex()}
            self._listener = Listener(
                self._socket, PROTOCOL, key, self._lines.put, most=_MOST_CALLERS, of_one=_OF_ONE
            )
            return
        self.address = str(Path(tempfile.mkdtemp(dir=folder)) / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(4096)
        self._socket.settimeout(_PATIENCE_S)

    def accept(self) -> socket.socket:
        """The next caller. Raises `TimeoutError` if none comes within a second."""
        if self._listener is None:
            return self._socket.accept()[0]
        try:
            return self._lines.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Take no more calls."""
        if self._listener is not None:
            self._listener.close()
        self._socket.close()
        self._held.close()


def _spawned(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as told:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True,
        )  # fmt: skip


def _met(door: _Door, contender: Contender) -> list[IO[str]]:
    """Lines to all ranks, in order; each says who it is."""
    wires: dict[int, IO[str]] = {}
    left_s = _START_LIMIT_S
    while len(wires) < contender.ranks:
        try:
            line = door.accept()
        except TimeoutError:
            left_s -= _PATIENCE_S
            ended = [p for p in contender.processes if p.poll() is not None]
            if ended or left_s < 0:
                raise contender._failed(f"{contender.name} did not start") from None  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            continue
        line.settimeout(_ANSWER_LIMIT_S)
        wire = line.makefile("rw", encoding="utf-8")
        line.close()  # the file holds it open
        wires[json.loads(wire.readline())["rank"]] = wire
    return [wires[rank] for rank in range(contender.ranks)]


def _commands(
    name: str, ranks: int, words: list[str], port: int
) -> Iterator[tuple[list[str], dict[str, str]]]:
    own = len(words) == 1
    worker = [sys.executable, "-m", "fivefold.bench.worker", name, *words] if own else words
    if mpi := _mpi_name(name):
        mpirun, environment = mpi_of(mpi)
        yield [str(mpirun), *mpi_options(mpi), "-n", str(ranks), *worker], environment
        return
    for rank in range(ranks):
        yield worker, {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip


def _on_nodes(
    name: str, nodes: Sequence[NodeRanks], address: str, folder: Path, options: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """What starts all ranks: `fivefold run`, or the MPI."""
    count = str(sum(node.ranks for node in nodes))
    worker = ["-m", "fivefold.bench.worker", name, address]
    if not (mpi := _mpi_name(name)):
        logs = ["--log-dir", str(folder / f"{name}-logs")]
        run = [sys.executable, "-m", "fivefold", "run", "-n", count, *options, *logs]
        return [*run, *worker], {}
    mpirun, environment = mpi_of(mpi)
    hosts = ",".join(f"{node.host}:{node.ranks}" for node in nodes if node.ranks)
    told = ["-hosts", hosts]
    if mpi == "openmpi":
        passed = (KEY, "OMP_NUM_THREADS", "PYTHONPATH", *environment)
        told = ["--host", hosts, *(word for variable in passed for word in ("-x", variable))]
    return [
        str(mpirun),
        *mpi_options(mpi),
        *told,
        "-n",
        count,
        sys.executable,
        *worker,
    ], environment


def _mpi_name(contender: str) -> str:
    """Of the MPI that starts a contender, or nothing."""
    name = contender.rpartition("-")[2]
    return name if name in ("openmpi", "mpich") else ""


def mpi_of(name: str) -> tuple[Path, dict[str, str]]:
    """The mpirun of an MPI, and what mpi4py needs to find the same one."""
    mpirun = mpirun_of(name)
    library = str(mpirun.parent.parent / "lib")
    environment = {"MPI4PY_MPIABI": name}
    if Path(library, "libmpi.so").exists() or list(Path(library).glob("libmpi*")):
        environment["LD_LIBRARY_PATH"] = library
    return mpirun, environment


def mpi_options(name: str) -> list[str]:
    """What a user types to run more ranks than cores here, as root if need be."""
    if name == "mpich":
        return []
    return ["--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0)]


def mpirun_of(name: str) -> Path:
    """An mpirun of this MPI: beside this Python, in an environment of its own there, or on PATH."""
    home = Path(sys.executable).parent
    named = os.environ.get("FIVEFOLD_MPIRUN", "mpirun")
    own = [home / "mpirun", home.parent / name / "bin" / "mpirun"]
    found = (shutil.which(program) for program in (named, f"mpirun.{name}", "mpirun"))
    for place in [*own, *map(Path, filter(None, found))]:
        try:
            if place.exists() and flavour(place) == name:
                return place
        except UsageError:
            continue
    raise UsageError(
        f"{CONTENDERS[name]} is not here: pip install {name} mpi4py, or name its mpirun with "
        "FIVEFOLD_MPIRUN"
    )
