"""A tree of JSON values and a payload to a batch. Every value is checked: it may be damaged, or worse."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.helpers.encode import NUMPY_KINDS, PLAIN, is_dense

__all__ = ["DecodeError", "decode"]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class DecodeError(FivefoldError):
    """What came is no batch, or one of a structure that this process does not know."""


def decode(
    fields: Mapping[str, Any], payload: memoryview, known: Mapping[str, type] | None = None
) -> Any:
    """The batch that was encoded. Its tensors and arrays are views of `payload`, and keep it alive.

    Args:
        fields: those of `Encoded`, and perhaps more.
        payload: the parts, one after the other, writable and 64-byte aligned.
        known: types that may be built, from `types_in` of a batch that this process made itself.

    Raises:
        DecodeError: it is no batch, or holds a type that is not known.
    """
    decoder = Decoder(payload, known or {})
    try:
        tree = fields["batch"]
        if isinstance(tree, dict):
            tree = json.loads(bytes(decoder.cut(*cast(dict[str, Any], tree)["tree"])))
        return decoder.node(tree)
    except DecodeError:
        raise
    except Exception as problem:  # noqa: BLE001 - whatever is wrong with the tree, it is no batch
        raise DecodeError(f"what came is no batch: {type(problem).__name__}: {problem}") from None


class Decoder:
    """Builds a batch whose leaves are views of `payload`; types other than Python's own must be `known`."""

    def __init__(self, payload: memoryview, known: Mapping[str, type]) -> None:
        self._payload, self._known = payload, known

    def cut(self, start: int, length: int) -> memoryview:
        """Bytes of the payload. Raises `DecodeError` if it has none there."""
        if not 0 <= start <= start + length <= len(self._payload):
            raise DecodeError(
                f"bytes {start} to {start + length} of a payload of {len(self._payload)} bytes"
            )
        return self._payload[start : start + length]

    def node(self, tree: Any) -> Any:
        """The value of a tree. Raises `DecodeError`, or whatever comes of a wrong one."""
        if isinstance(tree, list):
            name, *rest = cast(list[Any], tree)
            return _DECODERS[name](self, *rest)
        if type(tree) in (float, *PLAIN):
            return tree
        raise DecodeError(f"a batch holds a JSON {type(tree).__name__}")

    def kind(self, name: str) -> type:
        """A type that a batch is built of. Raises `DecodeError` if it is not known."""
        if name not in self._known:
            raise DecodeError(
                f"a batch holds {name}, which this process's own first batch does not: return the same types "
                "in every batch"
            )
        return self._known[name]


def _nan(_: Decoder, text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def _complex(decoder: Decoder, real: Any, imaginary: Any) -> complex:
    return complex(decoder.node(real), decoder.node(imaginary))


def _bytes(decoder: Decoder, at: Sequence[int]) -> bytes:
    return bytes(decoder.cut(*at))


def _range(_: Decoder, start: int, stop: int, step: int) -> range:
    return range(start, stop, step)


def _tuple(decoder: Decoder, *nodes: Any) -> tuple[Any, ...]:
    return tuple(map(decoder.node, nodes))


def _list(decoder: Decoder, *nodes: Any) -> list[Any]:
    return [decoder.node(node) for node in nodes]


def _dict(decoder: Decoder, keys: Sequence[Any], *nodes: Any) -> dict[Any, Any]:
    return dict(zip(map(decoder.node, keys), map(decoder.node, nodes), strict=True))


def _ordered(decoder: Decoder, keys: Sequence[Any], *nodes: Any) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(decoder, keys, *nodes))


def _named(decoder: Decoder, name: str, *nodes: Any) -> Any:
    kind: Any = decoder.kind(name)
    if not issubclass(kind, tuple):
        raise DecodeError(f"{name} is no named tuple")
    return kind(*map(decoder.node, nodes))


def _data(decoder: Decoder, name: str, *nodes: Any) -> Any:
    kind: Any = decoder.kind(name)
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**dict(zip(names, map(decoder.node, nodes), strict=True)))


def _tensor(
    decoder: Decoder,
    at: Sequence[int],
    dtype_name: str,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Tensor:
    dtype = _DTYPES[dtype_name]
    count = _count(shape, at[1], dtype.itemsize)
    if not count:
        flat = torch.empty(0, dtype=dtype)
    else:
        # As bytes first: not every dtype can be made from a buffer.
        flat = torch.frombuffer(decoder.cut(*at), dtype=torch.uint8).view(dtype)
    if strides is None:
        return flat.view(tuple(shape))
    if not is_dense(shape, strides):
        raise DecodeError(f"strides {strides} for shape {shape}")
    return torch.as_strided(flat, tuple(shape), tuple(strides))


def _array(
    decoder: Decoder,
    at: Sequence[int],
    dtype_name: str,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype_name)
    if dtype.kind not in NUMPY_KINDS:
        raise DecodeError(f"an array of dtype {dtype_name!r}")
    if not _count(shape, at[1], dtype.itemsize):
        return np.empty(tuple(shape), dtype)
    if strides is not None and not is_dense(shape, strides, dtype.itemsize):
        raise DecodeError(f"strides {strides} for shape {shape}")
    return np.ndarray(tuple(shape), dtype, decoder.cut(*at), 0, strides)


def _scalar(decoder: Decoder, *rest: Any) -> Any:
    return _array(decoder, *rest)[()]


def _count(shape: Sequence[int], length: int, itemsize: int) -> int:
    """How many elements there are. Raises `DecodeError` unless they need `length` bytes."""
    count = math.prod(shape)
    if min(shape, default=0) < 0 or length != count * itemsize:
        raise DecodeError(f"{length} bytes for shape {shape} with {itemsize} bytes per element")
    return count


_DECODERS: dict[str, Callable[..., Any]] = {
    "nan": _nan,
    "complex": _complex,
    "bytes": _bytes,
    "range": _range,
    "tuple": _tuple,
    "list": _list,
    "dict": _dict,
    "OrderedDict": _ordered,
    "named": _named,
    "data": _data,
    "tensor": _tensor,
    "array": _array,
    "scalar": _scalar,
}
