"""What tests of the loader share: a seat in a mesh of any size, data sets that draw, and fingerprints.

A `Seat` is the part of a mesh that the loader looks at. It makes any number of ranks in one process,
without a process group; `tests/threads/test_loader_mesh.py` does the same on real meshes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fivefold.data import Loader, loader
from fivefold.mesh import owned
from fivefold.plan import Layout, Plan


@dataclass(frozen=True)
class Seat:
    rank: int = 0
    ranks: int = 1
    plan: Plan = field(default_factory=Plan)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    role: str = "trainer"

    @property
    def layout(self) -> Layout:
        return Layout(data=self.ranks)

    def share(self, n: int) -> range:
        return owned(n, self.ranks, self.rank)


class Numbers:
    """`length` samples (x, y): x is 3 numbers that say which sample it is, y its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index


class Drawing(Numbers):
    """Samples that draw from all three global generators, like a user's augmentation."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.rand(3),
            "numpy": np.random.rand(3),  # noqa: NPY002
            "python": random.random(),
            "name": f"sample {index}",
        }


def make(dataset: Any, seat: Seat | None = None, **options: Any) -> Loader:
    return loader(dataset, seat or Seat(), **options)  # type: ignore[arg-type]


def joined(shares: Sequence[Any]) -> Any:
    """The whole batch from the ranks' shares of it."""

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)
        return [item for part in parts for item in part]

    return pytree.tree_map(join, *shares, is_leaf=lambda node: isinstance(node, list))


def fingerprint(batches: Iterable[Any]) -> str:
    """A hash of every byte, shape, dtype and string of some batches, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        leaves, structure = pytree.tree_flatten(batch)
        digest.update(repr(structure).encode())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                digest.update(leaf.contiguous().numpy().tobytes())
            else:
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


def whole_stream(
    dataset: Any, *, ranks: int, epochs: int = 1, **options: Any
) -> tuple[str, list[Loader]]:
    """The fingerprint of what `ranks` ranks read together, and their loaders (to be closed)."""
    loaders = [make(dataset, Seat(rank, ranks), **options) for rank in range(ranks)]
    together = (joined(shares) for _ in range(epochs) for shares in zip(*loaders, strict=True))
    return fingerprint(together), loaders


def generator_states() -> tuple[bytes, bytes, Any]:
    """The state of the process's three generators."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), repr(numpy_state).encode(), random.getstate()
