"""Divided parameters over gloo and over shared memory, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import sharding
from fivefold.arena.native import problem
from pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.mark.long
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
@pytest.mark.parametrize("backend", ["gloo", "fivefold"])
def test_it_trains_as_undivided_replicas_do(pool: Pool, backend: str, shard: str) -> None:
    if backend == "fivefold" and problem():
        pytest.skip("installed without the C core")
    expected = pool.run("gloo", sharding.trained, "none", 2)[0]
    for found in pool.run(backend, sharding.trained, shard, 2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
