"""Who produces the batches of a loader: helpers, worker processes, or the loader itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from fivefold.data.source import Made, Source
from fivefold.data.tiling import TiledSamples
from fivefold.data.workers import Key, Workers
from fivefold.errors import OffloadWarning, warn
from fivefold.launch.role import is_helper
from fivefold.mesh import Mesh

__all__ = ["Producer", "producer_of"]


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
