"""Large tensors, wherever they lie: in arenas, outside, or some here and some there; and where the kernel
refuses to read another process.
"""

from __future__ import annotations

import platform

import pytest

import comm_places
from fivefold.arena.native import problem
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.mark.long
@pytest.mark.parametrize(("count", "places"), [(20_000, "aaa pap"), (1_060_000, "aa pp pa")])
def test_large_tensors_are_right_wherever_they_lie(count: int, places: str) -> None:
    with Pool(3) as pool:
        for where in places.split():
            right = pool.run("fivefold", comm_places.every_place, count, where, size=len(where))
            assert sum(right) >= len(where) * len(comm_places.OPERATIONS)


@pytest.mark.skipif(platform.machine() not in comm_places.CALLS, reason="other system calls")
def test_where_processes_may_not_be_read_tensors_are_staged_and_one_line_says_so() -> None:
    with Pool(3) as pool:
        found = pool.run("fivefold", comm_places.forbidden, "process_vm_readv", 600_000)
    assert [right for _, right in found] == [1, 1, 1]
    first, *others = (lines for lines, _ in found)
    assert len(first) == 1 and not any(others)
    assert "rank 1 may not read the memory of rank 0 (Operation not permitted)" in first[0]
    assert "copied twice" in first[0]
