"""Randomness of samples: every sample gets generators of its own, whoever computes it.

A user's data set or transform draws from torch's, numpy's and Python's global generators, as it always
did. Right before a sample is read, all three are seeded from

    blake2b(seed, epoch, index of the sample in the data set)

so what it draws depends on nothing else: not on its batch, its rank, its worker, or on what was computed
before it. The hash is counter-based, so nothing has to be stored or sent. Around a whole share the
process's own generators are put aside and restored.

Seeding costs about 8 us a sample (Python's generator is half of that), putting aside and restoring
80 us a share.
"""

from __future__ import annotations

import os
import random
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

__all__ = ["Drawn", "isolated", "permutation", "seed_sample"]

_COUNTERS = struct.Struct("<QQQ")
_SEEDS = struct.Struct("<QLQ")

# The generators belong to the process: two threads that load at once would reseed under each other.
_turn = threading.RLock()


def _new_turn() -> None:
    """A worker forked while another thread had the turn would wait for it forever."""
    global _turn  # noqa: PLW0603
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order of `length` samples in an epoch: int64, each of 0 to length - 1 once.

    Drawn from numpy's legacy generator, whose stream is frozen for good (NEP 19): a run resumes in the
    same order under a later numpy.
    """
    digest = blake2b(_COUNTERS.pack(seed, epoch, length), person=b"fivefold order").digest()
    generator = np.random.RandomState(np.frombuffer(digest, dtype="<u4"))
    order = np.arange(length, dtype=np.int64)
    generator.shuffle(order)
    return order


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed torch's (CPU), numpy's and Python's global generators for one sample.

    `torch.manual_seed` would do, but it also visits every accelerator, which costs ten times as much.
    """
    counters = _COUNTERS.pack(seed, epoch, index)
    digest = blake2b(counters, digest_size=_SEEDS.size, person=b"fivefold sample").digest()
    for_torch, for_numpy, for_python = _SEEDS.unpack(digest)
    torch.default_generator.manual_seed(for_torch)
    np.random.seed(for_numpy)  # noqa: NPY002
    random.seed(for_python)


@dataclass(frozen=True)
class Drawn:
    """Where the global generators are, so that the same numbers can be drawn again."""

    torch_state: Any
    numpy_state: Any
    python_state: Any

    @classmethod
    def now(cls) -> Drawn:
        """Where they are."""
        numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
        return cls(torch.default_generator.get_state(), numpy_state, random.getstate())

    def again(self) -> None:
        """Put them there."""
        torch.default_generator.set_state(self.torch_state)
        np.random.set_state(self.numpy_state)  # noqa: NPY002
        random.setstate(self.python_state)


@contextmanager
def isolated() -> Generator[None]:
    """Put the global generators aside, restore them when the block ends; one thread at a time.

    The block computes with one thread, as workers do: torch splits a large sum by the number of threads,
    so a mean over an image would differ in its last bit between a worker and the rank itself.
    """
    with _turn:
        threads = torch.get_num_threads()
        before = Drawn.now()
        if threads > 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if threads > 1:
                torch.set_num_threads(threads)
            before.again()
