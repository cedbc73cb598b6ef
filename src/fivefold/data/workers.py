"""Worker processes: torch's DataLoader, which carries keys out and batches back.

A key says which share of which batch; the epoch travels in it, so the workers live on from epoch to epoch.
Which worker gets which key makes no difference to the batch (`fivefold.data.source`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fivefold.data.source import BatchId, LoadError, Made, Skipped, Source
from fivefold.errors import DataError, FivefoldError, UsageError
from fivefold.torch_private import loader_iterator, pytree
from fivefold.trace import active
from fivefold.trace.ready import ready_batches

__all__ = ["Key", "Workers"]


class Key(NamedTuple):
    """Which share of which batch: positions [start, stop)."""

    epoch: int
    batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Parcel:
    """A batch on its way. Pins itself: DataLoader would not look into every kind of pytree."""

    batch: Any
    skipped: tuple[Skipped, ...]

    def pin_memory(self) -> _Parcel:
        return _Parcel(pytree.tree_map_only(Tensor, Tensor.pin_memory, self.batch), self.skipped)


class _InWorkerError(Exception):
    """Shows the traceback of the worker as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    """An error on its way: DataLoader would bury the message in a traceback."""

    kind: type[FivefoldError]
    message: str
    traceback: str

    @classmethod
    def of(cls, error: FivefoldError) -> _Failure:
        kind = next((k for k in (DataError, UsageError) if isinstance(error, k)), LoadError)
        return cls(kind, str(error), "".join(traceback.format_exception(error)))

    def error(self) -> FivefoldError:
        error = self.kind(self.message)
        error.__cause__ = _InWorkerError(self.traceback)
        return error


class _Shares(Dataset["_Parcel | _Failure"]):
    """What runs in a worker: the source behind a data set whose indices are keys."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, index: Key) -> _Parcel | _Failure:
        epoch, batch, start, stop = index
        try:
            return _Parcel(*self.source.make(BatchId(epoch, batch), range(start, stop)))
        except FivefoldError as error:
            return _Failure.of(error)


class _Keys:
    """The sampler: whatever keys come next. DataLoader asks for a new iterator when iteration begins."""

    def __init__(self) -> None:
        self.coming: Iterable[Key] = ()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.coming)


def _counted(iterator: Iterator[Any]) -> Iterator[Any]:
    """What it gives; how far workers are ahead is told to the trace."""
    while True:
        trace = active()
        if trace is not None and (ready := ready_batches(iterator)) is not None:
            trace.ready(ready)
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def _as_is(item: Any) -> Any:
    return item


class Workers:
    """`count` processes that produce shares of `source` ahead of time, in order.

    They start with the first batch that is asked for, stay for later epochs, and end with `close`, or when
    nobody holds this object any more.
    """

    def __init__(
        self, source: Source, *, count: int, prefetch: int, pin: bool, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._keys = _Keys()
        self._loader = DataLoader(
            _Shares(source),
            batch_size=None,
            sampler=self._keys,
            num_workers=count,
            prefetch_factor=prefetch,
            collate_fn=_as_is,
            persistent_workers=True,
            pin_memory=pin,
            timeout=timeout_s,
            # DataLoader draws a seed for each epoch; the process's own generator must not notice.
            generator=torch.Generator(),
        )

    def produce(self, keys: Iterable[Key], following: Iterable[Key] = ()) -> Iterator[Made]:
        """The batches of `keys`, in order; calling it again drops what an earlier call had under way.

        `following` is left alone: workers do not begin the next epoch.

        Raises:
            FivefoldError: what `Source.produce` raised in the worker.
            LoadError: a worker died, or took longer than the timeout over one batch.
        """
        del following
        self._keys.coming = keys
        try:
            for item in _counted(iter(self._loader)):
                if isinstance(item, _Failure):
                    raise item.error()
                yield Made(item.batch, item.skipped)
        except RuntimeError as error:  # how DataLoader reports workers that died or hang
            self.close()
            raise LoadError(
                f"a loader worker died or gave no batch within {self._timeout_s:g} s ({error}); workers "
                "that are killed often lack memory: try fewer (loader.workers), or less loader.prefetch"
            ) from error

    def close(self) -> None:
        """End the processes; `produce` starts new ones."""
        iterator = loader_iterator(self._loader, take=True)
        if iterator is not None:
            # Dropping the last reference does the same, but a traceback may hold one.
            end: Callable[[], None] = getattr(iterator, "_shutdown_workers")  # noqa: B009
            end()
