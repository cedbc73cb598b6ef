"""The processes of contenders: all exist at once, one communicates while the others are blocked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fivefold.closing import Closing
from fivefold.errors import FivefoldError, UsageError
from fivefold.launch.mpirun import flavour
from fivefold.launch.port import reserved_port

__all__ = ["CONTENDERS", "BenchError", "Contender", "mpirun_of", "start"]

CONTENDERS: Mapping[str, str] = {
    "fivefold": "Fivefold",
    "fivefold-arena": "Fivefold, tensors in the arena",
    "gloo": "gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
}
"""What can be measured, and how it is called."""

_START_LIMIT_S = 120.0
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
    """to each rank, in the order of ranks"""
    log: Path

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
        for process in self.processes:
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _failed(self, what: str) -> BenchError:
        told = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return BenchError("\n".join([what, *told]))


def start(name: str, ranks: int, folder: Path, script: Sequence[str] = ()) -> Contender:
    """Start the ranks of a contender; `folder` takes its log and socket.

    `script` is the command of another benchmark, to be started instead of the worker; it is given the socket.
    Raises `UsageError` if the contender is not installed, `BenchError` if it does not start.
    """
    address = str(Path(tempfile.mkdtemp(dir=folder)) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(ranks)
        listener.settimeout(1.0)
        started = Contender(name, ranks, [], [], folder / f"{name}.log")
        try:
            with reserved_port(None) as port:
                for command, environment in _commands(name, ranks, [*script, address], port):
                    started.processes.append(_spawned(command, environment, started.log))
                started.wires = _met(listener, started)
        except BaseException:
            started.close()
            raise
    return started


def _spawned(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as told:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True,
        )  # fmt: skip


def _met(listener: socket.socket, contender: Contender) -> list[IO[str]]:
    """Lines to all ranks, in order; each says who it is."""
    wires: dict[int, IO[str]] = {}
    left_s = _START_LIMIT_S
    while len(wires) < contender.ranks:
        try:
            line, _ = listener.accept()
        except TimeoutError:
            left_s -= 1.0
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
    if name in ("openmpi", "mpich"):
        mpirun = mpirun_of(name)
        library = str(mpirun.parent.parent / "lib")
        environment = {"MPI4PY_MPIABI": name}
        if Path(library, "libmpi.so").exists() or list(Path(library).glob("libmpi*")):
            environment["LD_LIBRARY_PATH"] = library
        yield [str(mpirun), *_mpi_options(name), "-n", str(ranks), *worker], environment
        return
    for rank in range(ranks):
        yield worker, {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip


def _mpi_options(name: str) -> list[str]:
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
