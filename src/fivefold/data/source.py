"""Batches as a pure function.

    (data set, seed, epoch, batch) --> samples of that batch, in order, byte for byte

A `Source` holds everything that decides what is in a batch and nothing that decides who computes it: no
rank, no worker, no cursor. Worker processes get a copy of it; so does everyone else who is asked to produce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fivefold.data.collate import check_batch, emptied, stack
from fivefold.data.seeding import isolated, permutation, seed_sample
from fivefold.errors import FivefoldError, UsageError

__all__ = ["BatchId", "Collate", "LoadError", "Samples", "Source"]

Collate = Callable[[list[Any]], Any]
"""Samples, in order, to a batch whose tensors count samples along their first dim."""


class Samples(Protocol):
    """A map-style data set: any sample can be asked for by its index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LoadError(FivefoldError):
    """A batch could not be produced: the data set's own code failed, or a worker process died."""


@dataclass(frozen=True, order=True)
class BatchId:
    """Names one global batch; `batch` counts from 0 in every epoch."""

    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"batch {self.batch} of epoch {self.epoch}"


class Source:
    """Produces any part of any batch of `dataset`, alike wherever and however often it is asked."""

    def __init__(
        self,
        dataset: Samples,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> None:
        self.dataset = dataset
        self.length = len(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate = collate
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def size(self, batch_id: BatchId) -> int:
        """Samples in a batch: the batch size, or what is left at the end of an epoch."""
        return min(self.batch_size, self.length - batch_id.batch * self.batch_size)

    def indices(self, batch_id: BatchId) -> list[int]:
        """Which samples of the data set make up a batch, in order.

        Raises:
            UsageError: there is no such batch.
        """
        if batch_id.epoch < 0 or not 0 <= batch_id.batch < len(self):
            raise UsageError(
                f"there is no {batch_id}: epochs count from 0, and batches from 0 to {len(self) - 1}"
            )
        start = batch_id.batch * self.batch_size
        stop = start + self.size(batch_id)
        if not self.shuffle:
            return list(range(start, stop))
        if self._order is None or self._order[0] != batch_id.epoch:
            self._order = (batch_id.epoch, permutation(self.seed, batch_id.epoch, self.length))
        return self._order[1][start:stop].tolist()

    def produce(self, batch_id: BatchId, share: range | None = None) -> Any:
        """Samples `share` (positions in the batch; all of them by default), collated, on the CPU.

        An empty share has the structure, dtypes and trailing dims of a whole one.

        Raises:
            UsageError: there is no such batch or share, or its samples do not fit together.
            DataError: the data set says that a file is missing or damaged.
            LoadError: the data set's or the user's own code failed; names the sample and the batch.
        """
        indices = self.indices(batch_id)
        share = range(len(indices)) if share is None else share
        if share.step != 1 or not 0 <= share.start <= share.stop <= len(indices):
            raise UsageError(f"{batch_id} has {len(indices)} samples, so it has no {share}")
        # One sample is needed all the same: an empty tensor has a shape and a dtype.
        chosen = indices[share.start : share.stop] or indices[:1]
        with isolated():
            samples = [self._sample(index, batch_id) for index in chosen]
            batch = self._collated(samples, chosen, batch_id)
        return batch if share else emptied(batch)

    def _sample(self, index: int, batch_id: BatchId) -> Any:
        seed_sample(self.seed, batch_id.epoch, index)
        try:
            return self.dataset[index]
        except FivefoldError as error:
            error.add_note(f"while reading sample {index} for {batch_id}")
            raise
        except Exception as error:
            raise LoadError(
                f"sample {index} ({batch_id}) could not be read: {type(error).__name__}: {error}"
            ) from error

    def _collated(self, samples: list[Any], indices: Sequence[int], batch_id: BatchId) -> Any:
        if self.collate is None:
            return stack(samples)
        try:
            batch = self.collate(samples)
        except FivefoldError:
            raise
        except Exception as error:
            raise LoadError(
                f"collate failed on {batch_id}, samples {_few(indices)}: {type(error).__name__}: {error}"
            ) from error
        check_batch(batch, len(samples))
        return batch


def _few(indices: Sequence[int]) -> str:
    listed = ", ".join(str(index) for index in indices[:8])
    return listed if len(indices) <= 8 else f"{listed}, ..."
