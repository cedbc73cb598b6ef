"""Ranks as processes that stay: a call costs milliseconds once they are there.

    with Pool(4) as pool:
        values = pool.run("gloo", check, 17)     # check(17) in a default group, in every process; by rank

Functions are found by their names in the child, so they stand at the top of a module of tests' helpers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

__all__ = ["Failed", "Pool", "Task", "in_group"]

_context = multiprocessing.get_context("forkserver")


class Failed:
    """An exception of a rank, as text; the process goes on."""

    def __init__(self, problem: BaseException) -> None:
        self.kind = type(problem).__name__
        self.text = str(problem)
        self.trace = "".join(traceback.format_exception(problem))


@dataclass(frozen=True)
class Task:
    """A call of `module.name` within a group."""

    backend: str
    size: int
    path: str
    timeout_s: float
    module: str
    name: str
    arguments: tuple[Any, ...]
    nodes: Sequence[int] | None
    """by rank, which node it is to say that it is on"""
    comm: Mapping[str, Any]
    """of the plan"""


def _serve(line: Connection, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task: Task = line.recv()
        except EOFError:
            return
        try:
            line.send(in_group(rank, task, task.path))
        except Exception as problem:  # noqa: BLE001 - carried to the test
            line.send(Failed(problem))


def in_group(rank: int, task: Task, path: str) -> Any:
    """Call it in a group that ends with it; the ranks meet in a file."""
    import torch.distributed as dist

    import fivefold.comm  # knows the backend

    assert fivefold.comm.BACKEND
    if task.nodes is not None:
        from fivefold.comm import meeting, streams
        from fivefold.sections import Comm

        streams.configure(Comm(**task.comm), task.size if task.comm.get("transport") else 1)
        own = f"node {task.nodes[rank]}"
        meeting.node_name = lambda: own
    dist.init_process_group(
        task.backend,
        store=dist.FileStore(path, task.size),
        rank=rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.timeout_s),
    )
    try:
        return getattr(importlib.import_module(task.module), task.name)(*task.arguments)
    finally:
        if dist.is_initialized():  # some end it themselves
            dist.destroy_process_group()


class Pool:
    """Processes that run what they are told, all at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self._lines: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        _context.set_forkserver_preload(["torch.distributed", "fivefold.comm"])
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            there.close()
            self._lines.append(here)
            self.processes.append(process)

    def start(
        self,
        backend: str,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        timeout_s: float = 60.0,
        nodes: Sequence[int] | None = None,
        comm: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a call on the first `size` ranks, in a default group that ends with it.

        Ranks that are told to be on several `nodes` share no memory, and reach each other through the
        loopback interface, as `comm` of a plan says.
        """
        self._groups += 1
        path = str(Path(self._folder.name) / f"store-{self._groups}")
        size = self.size if size is None else size
        task = Task(
            backend,
            size,
            path,
            timeout_s,
            function.__module__,
            function.__name__,
            arguments,
            nodes,
            comm or {},
        )
        for line in self._lines[:size]:
            line.send(task)

    def collect(self, ranks: Sequence[int], timeout_s: float = 60.0) -> list[Any]:
        """What these ranks returned, or how they `Failed`."""
        found: list[Any] = []
        for rank in ranks:
            assert self._lines[rank].poll(timeout_s), f"rank {rank} does not answer"
            found.append(self._lines[rank].recv())
        return found

    def run(
        self,
        backend: str,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        nodes: Sequence[int] | None = None,
        comm: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call on the first `size` ranks; the first failure is raised here."""
        self.start(backend, function, *arguments, size=size, nodes=nodes, comm=comm)
        values = self.collect(range(self.size if size is None else size))
        for rank, value in enumerate(values):
            assert not isinstance(value, Failed), f"rank {rank}:\n{value.trace}"
        return values

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            line.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
            process.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Processes import this module, and from there the functions of tests, by name.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
)
