"""When all ranks had come to an operation, as the ranks of a node tell each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import trace_checks
from fivefold.arena.native import problem
from pool import Pool


@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_know_when_the_last_of_them_came(size: int, tmp_path: Path) -> None:
    with Pool(size) as pool:
        found = pool.run("fivefold", trace_checks.arrivals, str(tmp_path), size=size)
    assert len(found[0]) == 14 * size
    for same in zip(*found, strict=True):
        kinds, begins, starts, ends = zip(*same, strict=True)
        assert len({*kinds}) == 1
        assert len({*starts}) == 1, "one clock, one moment"
        assert max(begins) <= starts[0] <= min(ends), f"{kinds[0]} began {begins}, ended {ends}"


def test_of_other_backends_it_is_unknown(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.run("gloo", trace_checks.use_traced_groups)
        found = pool.run("gloo", trace_checks.arrivals, str(tmp_path))
    assert found[0] and all(start == 0 for rank in found for _, _, start, _ in rank)
