"""The loader: this rank's share of every batch, in order, from wherever the run stands.

    loader = ff.loader(dataset, mesh, batch_size=64, seed=0)
    for epoch in range(loader.upcoming.epoch, 10):
        for x, y in loader:                      # the rest of one epoch
            ...

The stream of batches is the same for every number of ranks and workers. A rank gets positions
`mesh.share(n)` of a batch of n samples; if there are fewer samples than ranks, some get empty tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from fivefold.closing import Closing
from fivefold.data.source import BatchId, Collate, Samples, Source
from fivefold.data.tiling import TileCollate, noted, tiles_of
from fivefold.data.workers import Key, Workers
from fivefold.errors import DataError, UsageError
from fivefold.mesh import Mesh
from fivefold.trace import Phase, span

__all__ = ["Cursor", "Loader", "loader"]


@dataclass(frozen=True)
class Cursor:
    """The last batch that was consumed: handed to the training loop, not merely prefetched."""

    epoch: int = 0
    batch: int = -1
    """-1 before the first batch of all"""
    step: int = 0
    """batches consumed since the beginning, over all epochs"""


class Loader(Closing):
    """Iterating runs from the batch after the cursor to the end of that epoch. Made by `loader`.

    One iteration at a time: starting another ends the one before. `close()` (or `with`) ends the worker
    processes; iterating again starts new ones.
    """

    def __init__(
        self, source: Source, mesh: Mesh, *, workers: int, prefetch: int, tiled: bool = False
    ) -> None:
        self._source = source
        self._tiled = tiled
        self._mesh = mesh
        self._cursor = Cursor()
        self._iteration = 0
        self._workers = (
            Workers(
                source,
                count=workers,
                prefetch=prefetch,
                pin=mesh.device.type == "cuda",
                timeout_s=mesh.plan.comm.timeout_s,
            )
            if workers
            else None
        )

    def __len__(self) -> int:
        """Batches per epoch, wherever the cursor stands."""
        return len(self._source)

    @property
    def cursor(self) -> Cursor:
        """The last consumed batch."""
        return self._cursor

    @property
    def upcoming(self) -> BatchId:
        """The batch with which iteration goes on: the one after the cursor, in the next epoch if need be."""
        epoch, batch = self._cursor.epoch, self._cursor.batch + 1
        return BatchId(epoch, batch) if batch < len(self) else BatchId(epoch + 1, 0)

    def produce(self, batch_id: BatchId, share: range | None = None) -> Any:
        """Any batch, or positions `share` of it, on the CPU; the cursor stays. See `Source.produce`.

        Where windows are read, this rank's tiles of it.
        """
        made = self._source.produce(batch_id, share)
        return made[0] if self._tiled else made

    def __iter__(self) -> Iterator[Any]:
        """This rank's share of each batch left in the epoch, on `mesh.device`.

        Whole images, or, from a data set that offers windows, this rank's tile of them.

        Every tensor knows which part of the global batch it is (`fivefold.mesh.part_of`).
        """
        self._iteration = iteration = self._iteration + 1
        first = self.upcoming
        ids = [BatchId(first.epoch, batch) for batch in range(first.batch, len(self))]
        batches = self._produced([self._key(batch_id) for batch_id in ids])
        for batch_id in ids:
            if iteration != self._iteration:
                raise UsageError(
                    "this iteration over the loader ended when another began, or when the loader was "
                    "closed or moved by load_state_dict; use a second loader to read two streams at once"
                )
            with span(Phase.LOAD):
                batch = self._placed(next(batches), batch_id)
            self._cursor = Cursor(batch_id.epoch, batch_id.batch, self._cursor.step + 1)
            yield batch

    def _key(self, batch_id: BatchId) -> Key:
        share = self._mesh.share(self._source.size(batch_id))
        return Key(batch_id.epoch, batch_id.batch, share.start, share.stop)

    def _produced(self, keys: list[Key]) -> Iterator[Any]:
        if self._workers is not None:
            return self._workers.produce(keys)
        return (
            self._source.produce(BatchId(key.epoch, key.batch), range(key.start, key.stop))
            for key in keys
        )

    def _placed(self, made: Any, batch_id: BatchId) -> Any:
        batch, boxes = made if self._tiled else (made, None)
        samples = self._source.size(batch_id)
        start = self._mesh.share(samples).start
        here = pytree.tree_map_only(Tensor, self._moved, batch)
        return noted(here, boxes, samples=samples, start=start)

    def _moved(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._mesh.device, non_blocking=True)

    def _identity(self) -> dict[str, int]:
        """What makes this stream of batches this one: two that differ here are two streams."""
        source = self._source
        return {
            "seed": source.seed,
            "dataset_length": source.length,
            "batch_size": source.batch_size,
            "shuffle": int(source.shuffle),
            "drop_last": int(source.drop_last),
        }

    def state_dict(self) -> dict[str, int]:
        """The cursor and what identifies the stream. Equal on every rank; ranks and workers may change."""
        return {**asdict(self._cursor), **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batch that was consumed last when `state` was taken.

        Raises:
            UsageError: the state is of another stream (seed, data set, batch size), or no state at all.
        """
        expected = {**asdict(self._cursor), **self._identity()}
        if absent := [name for name in expected if name not in state]:
            raise UsageError(f"this is not the state of a loader: it has no {', '.join(absent)}")
        for name, here in self._identity().items():
            if state[name] != here:
                raise UsageError(
                    f"the state is of another stream of batches: its {name} is {state[name]}, this "
                    f"loader's is {here}; make the loader as it was, or start without the state"
                )
        cursor = Cursor(int(state["epoch"]), int(state["batch"]), int(state["step"]))
        if cursor.epoch < 0 or cursor.step < 0 or not -1 <= cursor.batch < len(self):
            raise UsageError(f"the state names a batch that does not exist: {cursor}")
        self._cursor = cursor
        self._iteration += 1

    def close(self) -> None:
        """End the worker processes and the iteration under way, if any."""
        self._iteration += 1
        if self._workers is not None:
            self._workers.close()


def loader(
    dataset: Samples,
    mesh: Mesh,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int | None = None,
    prefetch: int | None = None,
    collate: Collate | None = None,
) -> Loader:
    """A loader of `dataset`, alike for every number of ranks and workers.

    Args:
        dataset: anything with a length and samples by index (map-style). Samples may draw from torch's,
            numpy's and Python's global generators; generators that the data set made itself are its own
            business. Of one that offers windows (`fivefold.data.windows`), only this rank's tile is read.
        mesh: decides which samples of a batch this rank gets, and on which device.
        batch_size: samples in a batch over all ranks.
        seed: 0 to 2**64 - 1; decides the order and the randomness of every sample.
        shuffle: a new order in every epoch; else the order of the data set.
        drop_last: leave out the smaller batch at the end of an epoch.
        workers: processes that prepare batches; 0 prepares them here. Default: the plan's.
        prefetch: batches that each worker prepares ahead. Default: the plan's.
        collate: samples to batch. The default stacks pytrees. What it draws at random would depend on the
            number of ranks, so randomness belongs into the data set.

    Raises:
        UsageError: the data set is not map-style, a number makes no sense, or a transform needs whole images.
        DataError: the data set is empty.
    """
    _check_dataset(dataset)
    workers = mesh.plan.loader.workers if workers is None else workers
    prefetch = mesh.plan.loader.prefetch if prefetch is None else prefetch
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("workers", workers, 0),
        ("prefetch", prefetch, 1),
    ):
        if value < least:
            raise UsageError(f"{name} is {value}; it must be {least} or more")
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
    tiles = tiles_of(dataset, mesh)
    source = Source(
        dataset if tiles is None else tiles,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        collate=collate if tiles is None else TileCollate(collate),
    )
    if len(source) == 0:
        raise UsageError(
            f"no batch is left: the data set has {source.length} samples, a batch {batch_size}, and "
            "drop_last leaves out a smaller one; choose a smaller batch_size or drop_last=False"
        )
    return Loader(source, mesh, workers=workers, prefetch=prefetch, tiled=tiles is not None)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} can only be read from its beginning; the loader needs a map-style "
            "data set (__len__ and __getitem__(index)): each rank and worker reads just its own samples, "
            "and a resumed run goes on in the middle"
        )
    try:
        length = len(dataset)
    except TypeError as error:
        raise UsageError(
            f"{type(dataset).__name__} has no length; a map-style data set needs __len__ beside __getitem__"
        ) from error
    if length == 0:
        raise DataError(
            f"the data set ({type(dataset).__name__}) is empty: there is nothing to load"
        )
