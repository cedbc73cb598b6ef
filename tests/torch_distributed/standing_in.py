"""PyTorch's own tests of torch.distributed, with the backend "fivefold" in the place of gloo.

    python tests/torch_distributed/standing_in.py fivefold        all of them, as `make torch-distributed`
    python tests/torch_distributed/standing_in.py nodes           the same, each rank on one of two nodes
    python tests/torch_distributed/standing_in.py gloo            what gloo itself makes of them
    python tests/torch_distributed/standing_in.py traced          gloo with every operation recorded
    python tests/torch_distributed/standing_in.py fivefold -k broadcast

Many of these tests ask for the backend's name and skip all but gloo and NCCL: here it answers "gloo", so
that they run. Of the tests that gloo passes with two ranks and no GPU, only those in `GLOOS_OWN` are skipped.
Needs expecttest.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

CHOSEN = os.environ.setdefault(
    "FIVEFOLD_TESTED", sys.argv.pop(1) if len(sys.argv) > 1 else "fivefold"
)
os.environ.update(BACKEND="gloo", WORLD_SIZE=os.environ.get("WORLD_SIZE", "2"), OMP_NUM_THREADS="1")
os.environ.pop("CI", None)  # it asks for reports that take a package of torch's own
if "TEMP_DIR" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="fivefold-torch-tests-")
    os.environ["TEMP_DIR"] = _folder.name
    (Path(os.environ["TEMP_DIR"]) / "barrier").mkdir()
    (Path(os.environ["TEMP_DIR"]) / "test_dir").mkdir()

# ruff: noqa: E402 - torch's tests read the environment when they are imported
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import fivefold.comm

GLOOS_OWN = {"monitored_barrier_gloo": "torch offers monitored_barrier for gloo alone"}
"""parts of names of tests that ask for what only gloo has, and why"""
TRULY_NAMED = ("test_ddp_logging_data_cpu",)
"""tests that compare the name that a group tells with the one that it was made by"""
_get_backend = c10d.get_backend


def _stand_in() -> None:
    """Whoever asks for gloo gets ours, which says that it is gloo."""
    assert fivefold.comm.BACKEND in dist.Backend.backend_list

    def ours(backend: Any) -> Any:
        return "fivefold" if backend is not None and str(backend).lower() == "gloo" else backend

    def replaced(function: Any, position: int) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            given = list(arguments)
            if len(given) > position:
                given[position] = ours(given[position])
            if "backend" in named:
                named["backend"] = ours(named["backend"])
            return function(*given, **named)

        return wrapper

    # Events in traces are called after the backend that recorded them, and gloo's are counted: nothing else
    # is left out. Ours are tested in tests/processes/test_comm_events.py.
    distributed_test.PROFILING_SUPPORTED_BACKENDS = []
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []

    def named(group: Any = None) -> Any:
        name = _get_backend(group)
        return dist.Backend("gloo") if name == "fivefold" else name

    for module in (dist, c10d):
        module.init_process_group = replaced(c10d.init_process_group, 0)
        module.new_group = replaced(c10d.new_group, 2)
        module.get_backend = named


def _truly_named(test: Any) -> Any:
    """The test with a `get_backend` that says what is so: in its own process, so it is not put back."""

    @functools.wraps(test)
    def wrapper(self: Any) -> None:
        dist.get_backend = c10d.get_backend = _get_backend
        test(self)

    return wrapper


def _traced() -> None:
    """Every rank records what its groups do."""
    from fivefold.comm.tracing_groups import trace_groups
    from fivefold.trace.process import start

    trace_groups()
    begin = c10d.init_process_group

    def recorded(*arguments: Any, **named: Any) -> Any:
        begin(*arguments, **named)
        start(Path(os.environ["TEMP_DIR"]) / f"trace-{os.getpid()}", {"rank": dist.get_rank()})

    dist.init_process_group = c10d.init_process_group = functools.wraps(begin)(recorded)


def _on_two_nodes() -> None:
    """Ranks say by turns that they are on one node or another."""
    from fivefold.comm import meeting, registration

    world: list[int] = []
    meet = registration.meet

    def told(store: Any, rank: int, *arguments: Any) -> Any:
        world.append(rank)  # the first group is that of all
        meeting.node_name = lambda: f"node {world[0] % 2}"
        return meet(store, rank, *arguments)

    registration.meet = told


if CHOSEN in {"fivefold", "nodes"}:
    _stand_in()
    if CHOSEN == "nodes":
        _on_two_nodes()
elif CHOSEN == "traced":
    _traced()


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # A spawned process would import for seconds.
        self._start_processes(multiprocessing.get_context("fork").Process)


for _name in dir(TestDistributed):
    for _part, _why in GLOOS_OWN.items():
        if _name.startswith("test_") and _part in _name and CHOSEN in {"fivefold", "nodes"}:
            setattr(TestDistributed, _name, unittest.skip(_why)(getattr(TestDistributed, _name)))
    if _name in TRULY_NAMED and CHOSEN in {"fivefold", "nodes"}:
        setattr(TestDistributed, _name, _truly_named(getattr(TestDistributed, _name)))


if __name__ == "__main__":
    run_tests()
