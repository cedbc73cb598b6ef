"""The backend "fivefold" against gloo, operation by operation, and against a serial reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import comm_checks
import comm_messages
from fivefold.arena.native import problem
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.mark.long(every=8)
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("dtype", comm_checks.EVERY_DTYPE)
def test_every_operation_does_what_gloo_does(pool: Pool, dtype: str, later: bool) -> None:
    for size, count in ((2, 5), (3, 3001)):
        ours = pool.run("fivefold", comm_checks.every_operation, dtype, count, later, size=size)
        theirs = pool.run("gloo", comm_checks.every_operation, dtype, count, later, size=size)
        comm_checks.assert_same(ours, theirs, dtype)


def test_nothing_is_sent_where_nothing_is_given(pool: Pool) -> None:
    found = pool.run("fivefold", comm_checks.every_operation, "float32", 0, False, size=2)
    assert all(isinstance(result, list) for ranks in found for result in ranks.values()), found
    assert pool.run("fivefold", comm_messages.every_message, 0, size=2) == [[b""] * 4, [b""] * 3]


@pytest.mark.parametrize("count", [1, 100, 200_000])
def test_messages_arrive_as_over_gloo(pool: Pool, count: int) -> None:
    ours = pool.run("fivefold", comm_messages.every_message, count, size=3)
    assert ours == pool.run("gloo", comm_messages.every_message, count, size=3)


def test_objects_travel_as_over_gloo(pool: Pool) -> None:
    ours = pool.run("fivefold", comm_checks.every_object, size=3)
    assert ours == pool.run("gloo", comm_checks.every_object, size=3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_sums_are_those_of_one_process_bit_by_bit(pool: Pool, size: int) -> None:
    checked = pool.run("fivefold", comm_checks.random_operations, size, 30, 1 << 20, size=size)
    assert len(set(checked)) == 1 and checked[0] >= 30


@pytest.mark.parametrize("size", [3, 4])
def test_sums_in_order_are_those_of_one_process_that_adds_up(pool: Pool, size: int) -> None:
    asked = comm_checks.random_operations, 40 + size, 30, 1 << 20, None, False, True
    assert pool.run("fivefold", *asked, size=size)[0] >= 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_sums_of_all_sizes_and_eight_ranks(seed: int) -> None:
    with Pool(8) as pool:
        pool.run("fivefold", comm_checks.random_operations, seed, 30, 1 << 20)
        pool.run("fivefold", comm_checks.random_operations, seed + 100, 10, 64 << 20, size=2)


def test_works_that_nobody_waits_for_do_no_harm(pool: Pool) -> None:
    assert pool.run("fivefold", comm_checks.dropped_works, size=2) == [[2.0, 2.0]] * 2


def test_tensors_of_messages_that_have_ended_are_let_go(pool: Pool) -> None:
    assert pool.run("fivefold", comm_messages.kept_messages, size=2) == [[False, False]] * 2


def test_futures_hold_the_sums(pool: Pool) -> None:
    found = pool.run("fivefold", comm_checks.futures, size=2)
    assert found == [[2.0 * number for number in range(200)]] * 2
