"""Collectives of ranks that share a device, with memory of the host in its place, against gloo and one
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import comm_checks
import comm_direct
import trace_checks
from fivefold.arena.native import problem
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.mark.long(every=4)
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("dtype", comm_checks.EVERY_DTYPE)
def test_every_operation_does_what_gloo_does(pool: Pool, dtype: str, later: bool) -> None:
    for size, count in ((2, 5), (3, 0), (3, 30_001)):
        ours = pool.run("fivefold", comm_direct.every_operation, dtype, count, later, size=size)
        theirs = pool.run("gloo", comm_checks.every_operation, dtype, count, later, size=size)
        comm_checks.assert_same(ours, theirs, dtype)


def test_a_trace_shows_them_as_others(pool: Pool, tmp_path: Path) -> None:
    for name in ("ours", "others"):
        (tmp_path / name).mkdir()
    ours = pool.run("fivefold", comm_direct.recorded, str(tmp_path / "ours"), size=2)
    others = pool.run("fivefold", trace_checks.every_operation, str(tmp_path / "others"), size=2)
    for key in ("events", "results"):
        assert [rank[key] for rank in ours] == [rank[key] for rank in others]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["tree", "in order"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_sums_are_those_of_one_process_bit_by_bit(
    pool: Pool, size: int, one_by_one: bool
) -> None:
    asked = comm_direct.random_operations, size, 30, 1 << 20, one_by_one
    assert pool.run("fivefold", *asked, size=size)[0] >= 30


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_larger_than_a_window(pool: Pool, size: int) -> None:
    pool.run("fivefold", comm_direct.large_operations, (9 << 20) + 7, size=size)


def test_sums_where_tensors_lie_and_memory_that_is_given_again(pool: Pool) -> None:
    for size in (2, 4):
        found = pool.run("fivefold", comm_direct.placed, 70_000, size=size)
        assert found == [[True, True, False]] * size


def test_ranks_that_ask_for_different_things_are_told(pool: Pool) -> None:
    told = pool.run("fivefold", comm_direct.mismatch, size=2)
    assert all("all ranks of a group have to ask for the same" in text for text in told), told


@pytest.mark.parametrize("step", ["name", "marks", "open_marks", "allocate", "open"])
def test_all_ranks_do_without_where_one_cannot(pool: Pool, step: str) -> None:
    told = pool.run("fivefold", comm_direct.none_there, step, size=3)
    why = "not all" if step == "name" else f"no {step}"
    assert why in told[1]
    assert all(text for text in told), told
