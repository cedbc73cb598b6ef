"""What torch's profiler shows of the backend "fivefold", and what a group is said to be for."""

from __future__ import annotations

import pytest

import comm_places
from fivefold.arena.native import problem
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.mark.long
def test_a_profiler_sees_operations_with_their_bytes_and_what_they_are_for() -> None:
    with Pool(2) as pool:
        for names in pool.run("fivefold", comm_places.profiled):
            assert "fivefold:all_reduce 8 bytes, gradients" in names
            assert "fivefold:start broadcast 12 bytes, gradients" in names
            assert "fivefold:wait broadcast 12 bytes, gradients" in names
            assert "fivefold:wait receive 16 bytes" in names
            assert "fivefold:all_reduce, loss" in names
            assert not any("28 bytes" in name for name in names)


def test_a_group_that_says_what_it_is_for_is_named_so_when_a_rank_is_late() -> None:
    with Pool(2) as pool:
        told, _ = pool.run("fivefold", comm_places.late_with_tag)
    assert ", pipeline activations): Timed out waiting for rank 1" in told
