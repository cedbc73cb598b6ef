"""The loader: this rank's share of every batch, in order, from wherever the run stands.

    loader = ff.loader(dataset, mesh, batch_size=64, seed=0)
    for epoch in range(loader.upcoming.epoch, 10):
        for x, y in loader:                      # the rest of one epoch
            ...

The stream of batches is the same for every number of ranks and workers. A rank gets positions
`mesh.share(n)` of a batch of n samples; if there are fewer samples than ranks, some get empty tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import IterableDataset

from fivefold.closing import Closing
from fivefold.data.finishing import Later, put_off
from fivefold.data.source import (
    BatchId,
    Collate,
    LoadError,
    Made,
    OnError,
    Samples,
    Skipped,
    Source,
)
from fivefold.data.tiling import (
    SamplesReadLater,
    TileCollate,
    TiledSamples,
    noted,
    reads_later,
    tiles_of,
)
from fivefold.data.workers import Key, Workers
from fivefold.errors import DataError, DataWarning, FivefoldError, OffloadWarning, UsageError, warn
from fivefold.launch.role import is_helper
from fivefold.mesh import Mesh
from fivefold.mesh.agreement import Position, note_position
from fivefold.mesh.duty import help_instead
from fivefold.torch_private import pytree
from fivefold.trace import Phase, span

__all__ = ["Cursor", "Finish", "Loader", "loader"]

Finish = Callable[[Any], Any]
"""A batch to a batch, of each sample by itself, always in the same way; on the device of the batch."""

_SKIPPED_NAMED = 5
_AHEAD = 256


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
    processes, or lets helpers do something else; iterating again begins anew.
    """

    def __init__(
        self,
        source: Source,
        mesh: Mesh,
        producer: Producer | None,
        *,
        tiles: TiledSamples | None = None,
        later: Later | None = None,
        finish: Finish | None = None,
    ) -> None:
        self._source, self._mesh, self._producer = source, mesh, producer
        self._tiled = tiles is not None
        self._later, self._finish = later, finish
        self._cursor = Cursor()
        self._iteration = 0
        told = {"dataset": type(source.dataset).__qualname__, **self._identity()}
        self._made = tuple((str(value), name) for name, value in told.items())
        self._skipped: list[Skipped] = []
        self.skipped = 0
        """samples of this rank's shares that were left out so far, where `on_error` is "skip" """

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
        return self._finished(made[0] if self._tiled else made, batch_id)

    def __iter__(self) -> Iterator[Any]:
        """This rank's share of each batch left in the epoch, on `mesh.device`.

        Whole images, or, from a data set that offers windows, this rank's tile of them.

        Every tensor knows which part of the global batch it is (`fivefold.mesh.part_of`).
        """
        help_instead()
        self._iteration = iteration = self._iteration + 1
        first = self.upcoming
        ids = [BatchId(first.epoch, batch) for batch in range(first.batch, len(self))]
        batches = self._produced(
            [self._key(batch_id) for batch_id in ids], self._next_epoch(first.epoch + 1)
        )
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
        self._tell_skipped()

    def _next_epoch(self, epoch: int) -> list[Key]:
        """What will be asked for when this epoch is over, most likely."""
        return [self._key(BatchId(epoch, batch)) for batch in range(min(len(self), _AHEAD))]

    @property
    def source(self) -> Source:
        """Where the batches come from, but for this rank's share of them."""
        return self._source

    def read(self, ids: Sequence[BatchId], *, whole: bool = False) -> Iterator[Any]:
        """Some batches, in this order, as iterating yields them: this rank's share; the cursor stays.

        `whole`: all samples of each batch, which tiles of images rule out. An iteration under way ends.
        """
        assert not (whole and self._tiled), "a rank reads its tile of an image, never all of it"
        self._iteration = iteration = self._iteration + 1
        batches = self._produced([self._key(batch_id, whole=whole) for batch_id in ids])
        for batch_id in ids:
            if iteration != self._iteration:
                raise UsageError("reading ended when the loader was iterated over, read or closed")
            with span(Phase.LOAD):
                batch = self._placed(next(batches), batch_id, whole=whole)
            yield batch
        self._tell_skipped()

    def _key(self, batch_id: BatchId, *, whole: bool = False) -> Key:
        share = self._share(batch_id, whole=whole)
        return Key(batch_id.epoch, batch_id.batch, share.start, share.stop)

    def _share(self, batch_id: BatchId, *, whole: bool) -> range:
        samples = self._source.size(batch_id)
        return range(samples) if whole else self._mesh.share(samples)

    def _produced(self, keys: list[Key], following: Sequence[Key] = ()) -> Iterator[Made]:
        if self._producer is not None:
            return self._producer.produce(keys, following)
        return (
            self._source.make(BatchId(key.epoch, key.batch), range(key.start, key.stop))
            for key in keys
        )

    def _placed(self, made: Made, batch_id: BatchId, *, whole: bool = False) -> Any:
        batch, boxes = made.batch if self._tiled else (made.batch, None)
        here = self._finished(pytree.tree_map_only(Tensor, self._moved, batch), batch_id)
        position = Position(self._made, str(batch_id), batch_id.epoch)
        pytree.tree_map_only_(Tensor, lambda leaf: note_position(leaf, position), here)
        samples = self._source.size(batch_id)
        if self._source.on_error == "skip":
            self._skipped.extend(made.skipped)
            self.skipped += len(made.skipped)
            if self._mesh.layout.data > 1:
                return here  # how many samples other ranks left out is for the step to find out
            samples -= len(made.skipped)
        start = self._share(batch_id, whole=whole).start
        return noted(here, boxes, samples=samples, start=start)

    def _finished(self, batch: Any, batch_id: BatchId) -> Any:
        """The batch with what was put off, and what the user wants done here."""
        try:
            if self._later is not None:
                batch = self._later.finish(batch)
            return batch if self._finish is None else self._finish(batch)
        except FivefoldError:
            raise
        except Exception as error:
            raise LoadError(
                f"finish failed on {batch_id}: {type(error).__name__}: {error}"
            ) from error

    def _tell_skipped(self) -> None:
        """Say what was left out of an epoch."""
        skipped, self._skipped = self._skipped, []
        if skipped:
            named = "; ".join(s.why for s in skipped[:_SKIPPED_NAMED])
            more = ", ..." if len(skipped) > _SKIPPED_NAMED else ""
            warn(
                f'{len(skipped)} samples were left out, as on_error = "skip" allows: {named}{more}',
                DataWarning,
            )

    def _moved(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._mesh.device, non_blocking=True)

    def _identity(self) -> dict[str, int]:
        skips = self._source.on_error == "skip"
        return {**self._source.identity(), **({"skip_errors": 1} if skips else {})}

    def state_dict(self) -> dict[str, int]:
        """The cursor and what identifies the stream. Equal on every rank; ranks and workers may change."""
        return {**asdict(self._cursor), **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batch that was consumed last when `state` was taken.

        Raises:
            UsageError: the state is of another stream (seed, data set, batch size), or no state at all.
        """
        expected = {**asdict(self._cursor), **self._identity()}
        expected.pop("skip_errors", None)
        if absent := [name for name in expected if name not in state]:
            raise UsageError(f"this is not the state of a loader: it has no {', '.join(absent)}")
        for name, here in {"skip_errors": 0, **self._identity()}.items():
            if (there := state.get(name, 0)) != here:
                raise UsageError(
                    f"the state is of another stream of batches: its {name} is {there}, this "
                    f"loader's is {here}; make the loader as it was, or start without the state"
                )
        cursor = Cursor(int(state["epoch"]), int(state["batch"]), int(state["step"]))
        if cursor.epoch < 0 or cursor.step < 0 or not -1 <= cursor.batch < len(self):
            raise UsageError(f"the state names a batch that does not exist: {cursor}")
        self._cursor = cursor
        self._iteration += 1

    def close(self) -> None:
        """End the worker processes, if any, and the iteration under way."""
        self._iteration += 1
        if self._producer is not None:
            self._producer.close()


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
    finish: Finish | None = None,
    on_error: OnError | None = None,
) -> Loader:
    """A loader of `dataset`, alike for every number of ranks, workers and helpers.

    A `ToFloat` or `Normalise` at the end of a data set's `Compose` is applied to whole batches where they
    arrive, which changes no byte (`fivefold.data.finishing`).

    Args:
        dataset: anything with a length and samples by index (map-style). Samples may draw from torch's,
            numpy's and Python's global generators; generators that the data set made itself are its own
            business. Of one that offers windows (`fivefold.data.windows`), this rank reads its tile, by turns
            under a budget tile by tile.
        mesh: decides which samples of a batch this rank gets, and on which device.
        batch_size: samples in a batch over all ranks.
        seed: 0 to 2**64 - 1; decides the order and the randomness of every sample.
        shuffle: a new order in every epoch; else that of the data set.
        drop_last: leave out the smaller batch at the end of an epoch.
        workers: processes that prepare batches, where helpers do not; 0: none. By default the plan's.
        prefetch: batches that each worker prepares ahead. By default the plan's.
        collate: samples to batch. The default stacks pytrees. What it draws at random would depend on the
            number of ranks, so randomness belongs into the data set.
        finish: what is done to a rank's share of a batch where it arrives, on its device: never by a worker
            or helper, so the batches that travel can be small. It treats each sample by itself, draws
            nothing at random, and keeps the first dim, which may be 0.
        on_error: of a sample that cannot be read: "stop" raises the error; "skip" leaves it out, which is
            counted and told. Default: the plan's (`offload.on_error`).

    Raises:
        UsageError: no map-style data set, a number without sense, a transform that needs whole images, or
            samples that cannot be skipped under this layout.
        DataError: the data set is empty.
    """
    _check_dataset(dataset)
    given, workers = workers, mesh.plan.loader.workers if workers is None else workers
    prefetch = mesh.plan.loader.prefetch if prefetch is None else prefetch
    _check_numbers(seed, batch_size=(batch_size, 1), workers=(workers, 0), prefetch=(prefetch, 1))
    dataset, collate, later = _put_off(dataset, collate, mesh)
    tiles = tiles_of(dataset, mesh)
    on_error = _checked(on_error or mesh.plan.offload.on_error, mesh, windows=tiles is not None)
    source = Source(
        dataset if tiles is None else tiles, batch_size=batch_size, seed=seed, shuffle=shuffle,
        drop_last=drop_last, collate=collate if tiles is None else TileCollate(collate),
        # A helper's files are no reason to leave a sample out: the trainer decides that.
        on_error="stop" if is_helper() else on_error,
    )  # fmt: skip
    _check_left(source)
    producer = producer_of(source, mesh, tiles, workers=workers, prefetch=prefetch, given=given)
    return Loader(source, mesh, producer, tiles=tiles, later=later, finish=finish)


def _put_off(
    dataset: Samples, collate: Collate | None, mesh: Mesh
) -> tuple[Samples, Collate | None, Later | None]:
    """The data set, its collate, and what is left for whole batches, where there are some at once."""
    if collate is not None or reads_later(mesh.plan):
        return dataset, collate, None
    dataset, later = put_off(dataset)
    return dataset, later, later


def _check_numbers(seed: int, **numbers: tuple[int, int]) -> None:
    """`numbers`: value and least value by name."""
    for name, (value, least) in numbers.items():
        if value < least:
            raise UsageError(f"{name} is {value}; it must be {least} or more")
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed is {seed}; it must be from 0 to 2**64 - 1")


def _check_left(source: Source) -> None:
    if len(source) == 0:
        raise UsageError(
            f"no batch is left: the data set has {source.length} samples, a batch {source.batch_size}, and "
            "drop_last leaves out a smaller one; choose a smaller batch_size or drop_last=False"
        )


def _checked(on_error: OnError, mesh: Mesh, *, windows: bool) -> OnError:
    """Ranks must agree on what is left out, or need not know."""
    if on_error == "skip" and (windows or (mesh.layout.data > 1 and mesh.layout.tiles > 1)):
        raise UsageError(
            'on_error = "skip" cannot be used here: under tile axes several ranks hold parts of a sample '
            'and could not agree on leaving it out; use "stop", or a layout without height, width and depth'
        )
    return on_error


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


# ---- Who produces the batches of a loader: helpers, worker processes, or the loader itself


class Producer(Protocol):
    """Produces batches ahead of the loop that consumes them."""

    def produce(self, keys: Sequence[Key], following: Sequence[Key] = ()) -> Iterator[Made]:
        """The batches of `keys`, in order; `following` is what will be asked for next, most likely."""
        ...

    def close(self) -> None:
        """Stop; `produce` begins again."""
        ...


def producer_of(
    source: Source,
    mesh: Mesh,
    tiles: TiledSamples | None,
    *,
    workers: int,
    prefetch: int,
    given: int | None,
) -> Producer | None:
    """Who produces batches: helpers, worker processes, or the loader itself (None).

    `given`: how many workers the user asked for, None if the plan did. In a helper, trainers can ask for
    the batches of `source` from now on.
    """
    if isinstance(tiles, SamplesReadLater):
        if given:
            warn(
                f"workers={given} is not used: windows are read as turns come to them; leave it out, or set "
                "no memory.budget",
                DataWarning,
            )
        return None
    if is_helper():
        _offer(source)
    elif os.environ.get("FIVEFOLD_HELPERS"):
        offloaded = _offloaded(source, mesh, tiles)
        if offloaded is not None:
            if given:
                warn(
                    f"workers={given} is not used: helpers produce the batches; leave it out, or set "
                    "offload.augmentation = false in the plan",
                    OffloadWarning,
                )
            return offloaded
    if not workers:
        return None
    pin, timeout_s = mesh.device.type == "cuda", mesh.plan.comm.timeout_s
    return Workers(source, count=workers, prefetch=prefetch, pin=pin, timeout_s=timeout_s)


def _offer(source: Source) -> None:
    """Let trainers have the batches of `source` produced by this helper."""
    from fivefold.data.remote.serving import LoaderServing
    from fivefold.helpers.service import offer

    offer("loader", LoaderServing(source))


def _offloaded(source: Source, mesh: Mesh, tiles: TiledSamples | None) -> Producer | None:
    """Helpers as the producer, if the plan wants it. Imported when needed: it brings sockets and memory."""
    from fivefold.data.remote.offloaded import Offloaded
    from fivefold.helpers.dispatcher import Dispatcher

    dispatcher = Dispatcher.of(mesh)
    if dispatcher is None:
        return None
    number = dispatcher.number("loader")  # a helper counts all loaders, whoever produces for them
    if not mesh.plan.offload.augmentation:
        return None
    return Offloaded(
        source,
        dispatcher,
        number=number,
        axes={} if tiles is None else tiles.axes,
        ahead_bytes=mesh.plan.offload.prefetch_bytes,
        pin=mesh.device.type == "cuda",
    )
