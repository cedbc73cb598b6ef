"""Batches as a pure function.

    (data set, seed, epoch, batch) --> samples of that batch, in order, byte for byte

A `Source` holds everything that decides what is in a batch and nothing that decides who computes it: no
rank, no worker, no cursor. Worker processes get a copy of it; so does everyone else who is asked to produce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from fivefold.data.collate import check_batch, emptied, stack
from fivefold.data.seeding import isolated, permutation, seed_sample
from fivefold.errors import FivefoldError, UsageError

__all__ = ["BatchId", "Collate", "LoadError", "Made", "OnError", "Samples", "Skipped", "Source"]

Collate = Callable[[list[Any]], Any]
"""Samples, in order, to a batch whose tensors count samples along their first dim."""


OnError = Literal["stop", "skip"]
"""what becomes of a batch with a sample that cannot be read: an error, or it is smaller"""


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


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out since it could not be read."""

    index: int
    """in the data set"""
    why: str


class Made(NamedTuple):
    """What was produced, and what was left out of it."""

    batch: Any
    skipped: tuple[Skipped, ...] = ()


class Source:
    """Produces any part of any batch of `dataset`, alike wherever and however often it is asked.

    With `on_error="skip"` a sample that cannot be read is left out, so that its batch is smaller; what the
    stream is then depends on which samples can be read.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
        on_error: OnError = "stop",
    ) -> None:
        self.dataset = dataset
        self.length = len(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate = collate
        self.on_error: OnError = on_error
        self._orders: dict[int, np.ndarray] = {}

    def identity(self) -> dict[str, int]:
        """What makes a stream of batches this one: two that differ here are two streams."""
        return {
            "seed": self.seed,
            "dataset_length": self.length,
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

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
        return self._order(batch_id.epoch)[start:stop].tolist()

    def _order(self, epoch: int) -> np.ndarray:
        """Of the samples of an epoch. Two are kept: around the end of an epoch both are asked for."""
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.seed, epoch, self.length)
            # A new dict, since another thread may be reading this one.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return order

    def produce(self, batch_id: BatchId, share: range | None = None) -> Any:
        """Samples `share` (positions in the batch; all of them by default), collated, on the CPU.

        An empty share has the structure, dtypes and trailing dims of a whole one.

        Raises:
            UsageError: there is no such batch or share, or its samples do not fit together.
            DataError: the data set says that a file is missing or damaged.
            LoadError: the data set's or the user's own code failed; names the sample and the batch.
        """
        return self.make(batch_id, share).batch

    def make(self, batch_id: BatchId, share: range | None = None) -> Made:
        """As `produce`, together with the samples that were left out, which `on_error="skip"` allows.

        Raises as `produce`; also the error of the first sample if none of a batch can be read.
        """
        indices = self.indices(batch_id)
        share = range(len(indices)) if share is None else share
        if share.step != 1 or not 0 <= share.start <= share.stop <= len(indices):
            raise UsageError(f"{batch_id} has {len(indices)} samples, so it has no {share}")
        wanted = indices[share.start : share.stop]
        with isolated():
            samples, read, skipped = self._read(wanted, batch_id)
            if read:
                return Made(self._collated(samples, read, batch_id), skipped)
            # One sample is needed all the same: an empty tensor has a shape and a dtype.
            samples, read = self._one_of(indices, batch_id)
            return Made(emptied(self._collated(samples, read, batch_id)), skipped)

    def _read(
        self, indices: list[int], batch_id: BatchId
    ) -> tuple[list[Any], list[int], tuple[Skipped, ...]]:
        """Samples, their indices, and those that were left out."""
        if self.on_error == "stop":
            return [self._sample(index, batch_id) for index in indices], indices, ()
        samples: list[Any] = []
        read: list[int] = []
        skipped: list[Skipped] = []
        for index in indices:
            try:
                samples.append(self._sample(index, batch_id))
                read.append(index)
            except FivefoldError as error:
                skipped.append(Skipped(index, str(error)))
        return samples, read, tuple(skipped)

    def _one_of(self, indices: list[int], batch_id: BatchId) -> tuple[list[Any], list[int]]:
        """The first sample that can be read; the error of the first if none can."""
        first: FivefoldError | None = None
        for index in indices:
            try:
                return [self._sample(index, batch_id)], [index]
            except FivefoldError as error:
                if self.on_error == "stop":
                    raise
                first = first or error
        assert first is not None, "a batch has samples"
        raise first

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
