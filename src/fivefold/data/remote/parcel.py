"""A batch as text and bytes, and a batch again. Nothing is pickled, and no type is looked up by its name.

    ({"image": uint8 (64, 3, 32, 32)}, [3, 1])
        told     ["tuple", ["dict", ["image"], ["tensor", [0, 196608], "uint8", [64, 3, 32, 32]]], [...]]
        parts    the bytes of the tensor; every leaf begins at a multiple of 64

What arrives is byte for byte what was sent: values, dtypes, shapes, and the strides of tensors and arrays
that fill their memory (such as channels_last). Others, such as every second column, arrive contiguous.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import xxhash

from fivefold.data.windows import Box
from fivefold.errors import UsageError
from fivefold.helpers.messages import Buffer
from fivefold.helpers.opener import Opener, ParcelError
from fivefold.helpers.packer import Packer, fields_of, is_dataclass, is_namedtuple, type_name

__all__ = ["Parcel", "ParcelError", "pack", "types_in", "unpack"]

_INLINE_BYTES = 1 << 16
"""a longer structure travels with the payload"""


class Parcel(NamedTuple):
    """A batch, ready to be sent: `told, parts = pack(batch)`."""

    told: dict[str, Any]
    """what `unpack` needs: one entry, to be told along with others"""
    parts: list[Buffer]
    """the payload; memory of the batch, so the batch must not change"""

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return sum(map(len, self.parts))

    def digest(self) -> str:
        """Equal for equal batches: structure, dtypes, shapes, strides and every byte."""
        state = xxhash.xxh3_128(json.dumps(self.told).encode())
        for part in self.parts:
            state.update(part)
        return state.hexdigest()


def pack(batch: Any) -> Parcel:
    """The parcel of a batch.

    Raises:
        UsageError: it holds something that cannot travel; names the type and the remedy.
    """
    packer = Packer()
    try:
        tree = packer.node(batch)
        text = json.dumps(tree, separators=(",", ":"))
    except RecursionError:
        raise UsageError(
            "a batch is nested too deeply, or holds itself: return a flat one"
        ) from None
    except ValueError as problem:  # an integer of more than 4,300 digits
        raise UsageError(f"a batch cannot be sent to another process: {problem}") from None
    if len(text) > _INLINE_BYTES:
        tree = packer.part(memoryview(text.encode("ascii")))
        return Parcel({"parcel": {"tree": tree}}, packer.parts)
    return Parcel({"parcel": tree}, packer.parts)


def types_in(batch: Any) -> dict[str, type]:
    """The named tuples and dataclasses that a batch is built of: what `unpack` may build."""
    found: dict[str, type] = {}
    waiting = [batch]
    while waiting:
        node = waiting.pop()
        if is_namedtuple(node) or is_dataclass(node):
            found[type_name(type(node))] = type(node)
        waiting.extend(_children(node))
    return found


def unpack(
    told: Mapping[str, Any], payload: memoryview, known: Mapping[str, type] | None = None
) -> Any:
    """The batch of a parcel. Its tensors and arrays are views of `payload`, and keep it alive.

    Args:
        told: what `pack` told, and perhaps more.
        payload: the parts, one after the other, writable and 64-byte aligned.
        known: types that may be built, from `types_in` of a batch that this process made itself.

    Raises:
        ParcelError: it is no parcel, or holds a type that is not known.
    """
    opener = Opener(payload, {type_name(Box): Box, **(known or {})})
    try:
        tree = told["parcel"]
        if isinstance(tree, dict):
            tree = json.loads(bytes(opener.cut(*cast(dict[str, Any], tree)["tree"])))
        return opener.node(tree)
    except ParcelError:
        raise
    except Exception as problem:  # noqa: BLE001 - whatever is wrong with the tree, it is no batch
        raise ParcelError(f"what came is no batch: {type(problem).__name__}: {problem}") from None


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, (tuple, list)):
        yield from cast("tuple[Any, ...]", node)
    elif isinstance(node, dict):
        yield from cast("dict[Any, Any]", node)
        yield from cast("dict[Any, Any]", node).values()
    elif is_dataclass(node):
        yield from fields_of(node)
