"""What tests of offloaded loaders share: the stream, its helpers, and the dispatcher of the trainer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from fivefold.data import Loader
from fivefold.helpers.dispatcher import Dispatcher
from helping import KEY, Helpers, Nursery, loader_of, unix_addresses
from streams import Seat, fingerprint
from waiting import awaited

OPTIONS: dict[str, Any] = {
    "dataset": "remote_sets:Slowly", "arguments": [96], "batch_size": 8, "seed": 3,
}  # fmt: skip
BATCHES = 12
LONGER = {**OPTIONS, "arguments": [400]}


@contextlib.contextmanager
def starting(
    nursery: Nursery, folder: Path, patch: pytest.MonkeyPatch
) -> Generator[Callable[..., Helpers]]:
    """Give what starts helpers and names them to this process; at the end none of them is left."""

    def started(
        count: int = 1, options: dict[str, Any] | None = None, *, present: bool = True, **more: Any
    ) -> Helpers:
        addresses = more.pop("addresses", None) or unix_addresses(folder, count)
        listen, function = more.pop("listen", addresses), more.pop("function", "helping:iterate")
        patch.setenv("FIVEFOLD_HELPERS", ",".join(addresses))
        patch.setenv("FIVEFOLD_HELPER_KEY", KEY)
        there = listen if present else []
        return Helpers(nursery, there, function, options=options or OPTIONS, **more)

    try:
        yield started
        if os.environ.get("FIVEFOLD_HELPERS"):
            desk_here().close()
    finally:
        nursery.end_all()


def desk_here() -> Dispatcher:
    dispatcher = Dispatcher.of(Seat())  # type: ignore[arg-type]
    assert dispatcher is not None
    return dispatcher


def ready() -> int:
    """How many helpers can be granted leases."""
    dispatcher = desk_here()
    with dispatcher.lock:
        return sum(bool(peer.ready) for peer in dispatcher._peers)  # pyright: ignore[reportPrivateUsage]


def joined(count: int = 1) -> None:
    """Wait until helpers can be granted leases."""
    awaited(lambda: ready() >= count, f"the coming of {count} helpers")


def leases() -> list[int]:
    return [helper.leases for helper in desk_here().helpers()]


def here(seat: Seat | None = None, **changes: Any) -> Loader:
    return loader_of(seat or Seat(), **{**OPTIONS, **changes})


def alone(epochs: int = 1, **changes: Any) -> list[str]:
    """Fingerprints of the batches of the same stream, made by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FIVEFOLD_HELPERS", raising=False)
        data = here(**changes)
        return [fingerprint([batch]) for _ in range(epochs) for batch in data]


def alone_batches(seat: Seat | None = None, epochs: int = 1, **changes: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FIVEFOLD_HELPERS")
        data = here(seat, **changes)
        return [batch for _ in range(epochs) for batch in data]


def read(data: Loader, epochs: int = 1) -> list[str]:
    return [fingerprint([batch]) for _ in range(epochs) for batch in data]
