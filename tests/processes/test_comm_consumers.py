"""What torch builds on a process group does the same over "fivefold" as over gloo, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import comm_consumers
from fivefold.arena.native import problem
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.mark.long(every=8)
@pytest.mark.parametrize("consumer", comm_consumers.ALL)
def test_it_works_over_fivefold_as_over_gloo(pool: Pool, consumer: str) -> None:
    ours = pool.run("fivefold", comm_consumers.result_of, consumer)
    assert ours == pool.run("gloo", comm_consumers.result_of, consumer)


def test_buffers_of_fully_shard_lie_in_the_arena(pool: Pool) -> None:
    assert all(touched > 0 for touched in pool.run("fivefold", comm_consumers.arena_of_fully_shard))
