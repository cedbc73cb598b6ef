"""How a helper serves a loader: it produces the batches that trainers hold leases on.

A batch is a pure function, so it makes no difference who produces it (`fivefold.data.source`). What differs
between trainers is which tile of the images they want; the axes come with OPEN.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fivefold.data.collate import stack
from fivefold.data.seeding import isolated, seed_sample
from fivefold.data.source import BatchId, Source
from fivefold.data.tiling import TileCollate, TiledSamples
from fivefold.data.windows import Box, check_transform, windows_of
from fivefold.errors import DataError, UsageError
from fivefold.helpers.encode import encode
from fivefold.helpers.service import check_identity
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.torch_private import pytree
from fivefold.trace import Phase, span

if TYPE_CHECKING:
    from fivefold.helpers.link import Link
    from fivefold.wire.frames import Buffer, Message

__all__ = ["LoaderServing", "decode_boxes", "encode_boxes", "identity_of"]


def identity_of(source: Source) -> dict[str, Any]:
    """`Source.identity`, and what reads and collates samples: helper and trainer have the same."""
    dataset, collate = source.dataset, source.collate
    if isinstance(dataset, TiledSamples):
        dataset = dataset.windows
    if isinstance(collate, TileCollate):
        collate = collate.collate
    return {
        **source.identity(),
        "dataset": _name(type(dataset)),
        "collate": _name(collate or stack),
    }


def _name(thing: object) -> str:
    """The same in every process that runs the same script; no address in memory is part of it."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{getattr(kind, '__qualname__', '')}"


class LoaderServing:
    """Serves the loader of `source`, which is that of whole samples, to trainers with any tiles."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._opened: dict[int, _Opened] = {}

    def identity(self) -> dict[str, Any]:
        """See `identity_of`."""
        return identity_of(self._source)

    def open(self, fields: Mapping[str, Any], link: Link) -> dict[str, Any]:
        """See `Serving.open`; refuses another stream, and a data set that cannot be read here."""
        axes = _axes(fields.get("axes") or {})
        source = self._tiled(axes) if axes else self._source
        check_identity("loader", fields.get("identity") or {}, identity_of(source))
        unread = _unread(source)
        by_samples = unread is not None and not axes and _offers_samples(source.dataset)
        if unread is not None and not by_samples:
            raise UsageError(f"it cannot read the data set: {unread}")
        self._opened[id(link)] = _Opened(source, tiled=bool(axes), by_samples=by_samples)
        return {"samples": True} if by_samples else {}

    def waits(self, fields: Mapping[str, Any], link: Link) -> bool:
        """See `Serving.waits`: samples that the trainer has to send."""
        opened = self._opened[id(link)]
        return opened.by_samples and fields.get("lease") not in opened.sent

    def lease(
        self, fields: Mapping[str, Any], link: Link
    ) -> tuple[Mapping[str, Any], Sequence[Buffer]]:
        """See `Serving.lease`."""
        opened = self._opened[id(link)]
        batch_id, share = _wanted(fields)
        source = opened.source
        if opened.by_samples:
            source = _with_samples(source, batch_id, share, opened.sent.pop(fields.get("lease")))
        with span(Phase.AUGMENT):
            made = source.produce(batch_id, share)
        batch, boxes = made if opened.tiled else (made, None)
        fields, parts = encode(batch)
        return (fields if boxes is None else {**fields, "boxes": encode_boxes(boxes)}), parts

    def other(self, message: Message, link: Link) -> None:
        """See `Serving.other`: samples."""
        opened = self._opened.get(id(link))
        if opened is not None and opened.by_samples:
            opened.sent[message.fields.get("lease")] = _cut(message)

    def left(self, link: Link) -> None:
        """See `Serving.left`."""
        self._opened.pop(id(link), None)

    def _tiled(self, axes: dict[str, tuple[int, int]]) -> Source:
        """The source of one trainer's tiles, as its own `loader` makes it."""
        windows = windows_of(self._source.dataset)
        if windows is None:
            raise UsageError("the trainer reads tiles, but the data set here offers no windows")
        for name in ("transform", "target_transform"):
            check_transform(getattr(windows, name, None))
        source = copy.copy(self._source)
        source.dataset = TiledSamples(windows, axes)
        source.collate = TileCollate(self._source.collate)
        return source


class _Opened:
    """What one trainer gets."""

    def __init__(self, source: Source, *, tiled: bool, by_samples: bool) -> None:
        self.source, self.tiled, self.by_samples = source, tiled, by_samples
        self.sent: dict[Any, list[bytes]] = {}
        """samples by lease"""


def _axes(fields: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Tile axes by name: (tiles along it, which of them). Raises `UsageError` if that is not what came."""
    axes: dict[str, tuple[int, int]] = {}
    for name, pair in fields.items():
        if name not in TILE_DIMS or not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise UsageError(f"the trainer asks for tiles along {name!r}: {pair!r}")
        parts, index = cast(list[object], pair)
        if not isinstance(parts, int) or not isinstance(index, int) or not 0 <= index < parts:
            raise UsageError(f"the trainer asks for tile {index!r} of {parts!r} along {name}")
        axes[name] = (parts, index)
    return axes


def _wanted(fields: Mapping[str, Any]) -> tuple[BatchId, range]:
    try:
        epoch, batch, start, stop = (
            int(fields[name]) for name in ("epoch", "batch", "start", "stop")
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError("a lease that does not say which samples of which batch") from None
    return BatchId(epoch, batch), range(start, stop)


# ---- data sets that cannot be read here


def _unread(source: Source) -> str | None:
    """Why the first sample cannot be read, if that is for lack of its file."""
    index = source.indices(BatchId(0, 0))[0]
    try:
        with isolated():
            seed_sample(source.seed, 0, index)
            source.dataset[index]
    except Exception as problem:  # noqa: BLE001 - what is no matter of files is told with the first lease
        chain: BaseException | None = problem
        while chain is not None:
            if isinstance(chain, (OSError, DataError)):
                return str(problem)
            chain = chain.__cause__ or chain.__context__
    return None


def _offers_samples(dataset: object) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("raw", "decode"))


def _with_samples(source: Source, batch_id: BatchId, share: range, sent: list[bytes]) -> Source:
    """The source, reading what the trainer has sent in the place of its files."""
    indices = source.indices(batch_id)
    wanted = indices[share.start : share.stop] or indices[:1]
    if len(sent) != len(wanted):
        raise UsageError(f"{len(sent)} samples came for a lease on {len(wanted)}")
    source = copy.copy(source)
    source.dataset = _Sent(source.dataset, dict(zip(wanted, sent, strict=True)))
    return source


class _Sent:
    """Samples that came as bytes, decoded and transformed by the data set itself."""

    def __init__(self, dataset: Any, sent: dict[int, bytes]) -> None:
        self._dataset, self._sent = dataset, sent

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset.decode(self._sent[index])


def _cut(message: Message) -> list[bytes]:
    """The samples of a message, one after the other in its payload."""
    lengths, start = message.fields.get("lengths"), 0
    samples: list[bytes] = []
    for length in cast(list[object], lengths) if isinstance(lengths, list) else []:
        if not isinstance(length, int) or length < 0:
            return []
        samples.append(bytes(message.payload[start : start + length]))
        start += length
    return samples


# ---- boxes


def encode_boxes(boxes: Any) -> list[dict[str, Any] | None]:
    """The boxes of a batch as JSON, leaf by leaf."""
    return [
        None
        if box is None
        else {"size": list(box.size), "ranges": [[r.start, r.stop] for r in box.ranges]}
        for box in pytree.tree_leaves(boxes)
    ]


def decode_boxes(encoded: Sequence[Mapping[str, Any] | None], like: Any) -> Any:
    """Boxes from what `encode_boxes` made of them, in the structure of those of another batch."""
    boxes = [
        None
        if box is None
        else Box(tuple(box["size"]), tuple(range(*pair) for pair in box["ranges"]))
        for box in encoded
    ]
    return pytree.tree_unflatten(boxes, pytree.tree_structure(like))
