"""What links between nodes are measured to do when a run starts, on nodes that are busy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import trace_checks
from pool import Pool

LATE_S = 0.1
LATE_BYTES_PER_S = (1 << 20) / LATE_S * 2
"""of a MiB there and back that is late once"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("times", [0, 5, 9])
def test_a_link_that_was_slow_for_a_moment_is_measured_again(pool: Pool, times: int) -> None:
    """All turns of the first time, or of a second one as well."""
    found, *others = pool.run("gloo", trace_checks.links_of_a_busy_node, times, LATE_S)
    assert all(other == found for other in others)
    assert [link["ranks"] for link in found] == [[0, 1], [1, 2], [2, 0]]
    assert all(link["bytes_per_s"] > 2 * LATE_BYTES_PER_S for link in found), found
    assert all(0 < link["latency_s"] < LATE_S for link in found)


def test_a_link_that_stays_slow_is_told_so(pool: Pool) -> None:
    found, *_ = pool.run("gloo", trace_checks.links_of_a_busy_node, 10**6, LATE_S)
    slow = [link["bytes_per_s"] < 1.1 * LATE_BYTES_PER_S for link in found]
    assert slow == [True, True, False]
