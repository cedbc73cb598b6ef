"""Groups of several nodes between which MPI carries what goes by streams: `comm.transport = "mpi"`.

Ranks are started by both MPIs; their nodes are told, as in test_comm_nodes.py. Results are those of streams.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import by_mpi
import comm_checks
import comm_consumers
import comm_messages
import mpis
from commands import CLEAN
from fivefold.arena.native import problem
from pool import Failed, Pool

pytestmark = [
    pytest.mark.skipif(bool(problem()), reason="installed without the C core"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py"),
]
NODES = [(0, 1), (0, 1, 0, 1), (0, 1, 1, 1, 2), (0, 1, 2, 3, 4)]
SIZES = [("float32", 0), ("float32", 5), ("bfloat16", 30_001), ("float64", 300_001)]


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(5) as pool:
        yield pool


@pytest.mark.parametrize(
    "nodes",
    [NODES[0], *(pytest.param(nodes, marks=pytest.mark.long) for nodes in NODES[1:])],
    ids=str,
)
def test_every_operation_and_message_is_as_by_streams(
    mpi: str, pool: Pool, nodes: Sequence[int]
) -> None:
    size = len(nodes)
    asked = [(comm_checks.every_operation, *of, True) for of in SIZES]
    asked += [(comm_messages.every_message, count) for count in (3, 100_001)]
    random = (comm_checks.random_operations, size, 25, 1 << 20, nodes)
    many = (comm_messages.many_messages, size)
    *values, checked, _ = by_mpi.run(
        mpi, [by_mpi.task(*one, nodes=nodes) for one in [*asked, random, many]]
    )
    for one, value in zip(asked, values, strict=True):
        assert value == pool.run("fivefold", *one, size=size, nodes=nodes)
    assert len(set(checked)) == 1 and checked[0] >= 25


@pytest.mark.long
def test_what_torch_builds_on_groups_works(mpi: str, pool: Pool) -> None:
    tasks = [
        by_mpi.task(comm_consumers.result_of, name, nodes=(0, 1)) for name in comm_consumers.ALL
    ]
    for name, ours in zip(comm_consumers.ALL, by_mpi.run(mpi, tasks), strict=True):
        assert ours == pool.run("gloo", comm_consumers.result_of, name, size=2), name


def test_a_rank_that_is_late_is_named(mpi: str) -> None:
    task = by_mpi.task(comm_checks.lateness, 4.0, nodes=(0, 1, 2))
    found = by_mpi.run(mpi, [dataclasses.replace(task, timeout_s=0.5)])[0]
    for waited_s, text in (found[0], found[2]):
        assert 0.3 < waited_s < 3.5
        assert "Timed out waiting for rank 1" in text


@pytest.mark.long
def test_a_rank_that_asks_for_something_else_is_told(mpi: str) -> None:
    texts = by_mpi.run(mpi, [by_mpi.task(comm_checks.mismatch_on_nodes, nodes=(0, 1, 2))])[0]
    assert any("this rank asks for all_reduce sum of 3 float" in text for text in texts), texts


@pytest.mark.long
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_a_rank_that_is_killed_ends_the_job(mpi: str, later: bool, tmp_path: Path) -> None:
    """As MPI does with jobs of which a process has died; were it to go on, the others are told."""
    began = time.monotonic()
    started = by_mpi.start(mpi, [by_mpi.task(comm_checks.killed, later, nodes=(0, 1))], tmp_path)
    told, _ = started.communicate(timeout=60)
    assert started.returncode != 0, told
    assert time.monotonic() - began < 40


def test_what_was_sent_comes_though_its_sender_has_ended(mpi: str) -> None:
    """MPI does nothing on its own: a message that is too long for its buffers waits for both sides."""
    tasks = [
        by_mpi.task(comm_messages.sent_before_the_end, count, nodes=(0, 1)) for count in (1, 60_000)
    ]
    assert by_mpi.run(mpi, tasks) == [[None, 1.0], [None, 60_000.0]]


def test_ranks_that_mpi_has_not_started_are_told_so() -> None:
    with Pool(2) as pool:
        pool.start("fivefold", comm_checks.every_object, nodes=(0, 1), comm={"transport": "mpi"})
        for told in pool.collect(range(2)):
            assert isinstance(told, Failed) and told.kind == "UsageError"
            assert "knows 1 of 2 ranks; start them with the mpirun of that MPI" in told.text


SCRIPT = """
import os, sys
import mpi4py
if sys.argv[1] == "threads":
    mpi4py.rc.thread_level = "single"
from mpi4py import MPI  # which starts it in all ranks: were it in one only, MPI would wait
from dataclasses import replace
import fivefold as ff
from fivefold.errors import FivefoldError
from fivefold.plan import Plan
plan = Plan()
plan = replace(plan, comm=replace(plan.comm, timeout_s=3))
if sys.argv[1] != "one" or os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    plan = replace(plan, comm=replace(plan.comm, transport="mpi"))
try:
    ff.start(plan)
except FivefoldError as problem:
    print("told:", problem, flush=True)
    os._exit(2)
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("threads", "needs an MPI that any thread may call (MPI_THREAD_MULTIPLE)"),
        pytest.param("one", "has to be in the plan of each", marks=pytest.mark.long),
    ],
)
def test_what_mpi_cannot_do_is_told(mpi: str, case: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    mpirun = mpis.find(mpi)
    done = subprocess.run(
        [mpirun, *mpis.options(mpi), "-n", "2", sys.executable, "script.py", case],
        cwd=tmp_path, env=CLEAN | mpis.library(mpi), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert told in done.stdout, done.stdout + done.stderr
