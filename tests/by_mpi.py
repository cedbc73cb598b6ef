"""Ranks that MPI starts, and between which it carries streams: what `Pool` does for processes of our own.

values = by_mpi.run("openmpi", [by_mpi.task(check, 17, nodes=(0, 1))])     # by task, by rank
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpis
from commands import CLEAN
from pool import Failed, Task, in_group

__all__ = ["run", "start", "task"]


def task(function: Callable[..., Any], *arguments: Any, nodes: Sequence[int], **comm: Any) -> Task:
    """A call of `function` in a group of ranks on `nodes`, as `comm` of a plan says."""
    told = {"transport": "mpi", **comm}
    return Task(
        "fivefold",
        len(nodes),
        "",
        60.0,
        function.__module__,
        function.__name__,
        arguments,
        nodes,
        told,
    )


def start(name: str, tasks: Sequence[Task], folder: Path) -> subprocess.Popen[str]:
    """Begin the tasks, one after the other, under the mpirun of an MPI."""
    (folder / "tasks").write_bytes(pickle.dumps(tasks))
    mpirun = mpis.find(name)
    return subprocess.Popen(
        [mpirun, *mpis.options(name), "-n", str(tasks[0].size), sys.executable, __file__, folder],
        env=CLEAN | mpis.library(name) | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(name: str, tasks: Sequence[Task], timeout_s: float = 120.0) -> list[list[Any]]:
    """What each returned, by rank; the first failure is raised here."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        started = start(name, tasks, folder)
        try:
            told, _ = started.communicate(timeout=timeout_s)
        finally:
            started.kill()
        assert started.returncode == 0, told
        by_rank = [
            pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(tasks[0].size)
        ]
    for rank, values in enumerate(by_rank):
        for value in values:
            assert not isinstance(value, Failed), f"rank {rank}:\n{value.trace}"
    return [list(values) for values in zip(*by_rank, strict=True)]


def _serve(folder: Path) -> None:
    import torch

    from fivefold.launch.environment import locate

    torch.set_num_threads(1)
    rank, found = locate().rank, list[Any]()
    for number, one in enumerate(pickle.loads((folder / "tasks").read_bytes())):
        try:
            found.append(in_group(rank, one, str(folder / f"store-{number}")))
        except Exception as problem:  # noqa: BLE001 - carried to the test
            found.append(Failed(problem))
            break
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
