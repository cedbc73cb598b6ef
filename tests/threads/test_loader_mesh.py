"""The loader on real meshes: ranks along `data` share a batch, ranks of one tile group read the same."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fivefold.data import loader
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from ranks import run_ranks
from streams import Drawing, fingerprint, joined, make


class Slow(Drawing):
    """Lets other threads in between the seeding of a sample and its draws."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.001)
        return super().__getitem__(index)


def read(mesh: Mesh) -> list[Any]:
    return list(loader(Slow(19), mesh, batch_size=8, seed=4))


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        (Layout(data=2), [0, 1]),
        (Layout(data=3), [0, 1, 2]),
        (Layout(data=2, height=2), [0, 2]),
    ],
    ids=str,
)
def test_ranks_that_load_at_once_read_the_stream_of_one(
    layout: Layout, replicas: list[int]
) -> None:
    """Threads share the process's generators: reading takes turns, or they would reseed each other."""
    by_rank = run_ranks(layout, read)
    together = [
        joined(shares) for shares in zip(*(by_rank[rank] for rank in replicas), strict=True)
    ]
    assert fingerprint(together) == fingerprint(make(Drawing(19), batch_size=8, seed=4))
    for rank, batches in enumerate(by_rank):
        replica = rank // (layout.size // layout.data) * (layout.size // layout.data)
        assert fingerprint(batches) == fingerprint(by_rank[replica])
