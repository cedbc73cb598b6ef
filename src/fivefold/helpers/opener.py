"""A tree of JSON values and a payload to a batch. Every value is checked: it may be damaged, or worse."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.helpers.packer import NUMPY_KINDS, PLAIN, is_dense

__all__ = ["Opener", "ParcelError"]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class ParcelError(FivefoldError):
    """What came is no batch, or one of a structure that this process does not know."""


class Opener:
    """Builds a batch whose leaves are views of `payload`; types other than Python's own must be `known`."""

    def __init__(self, payload: memoryview, known: Mapping[str, type]) -> None:
        self._payload, self._known = payload, known

    def cut(self, start: int, length: int) -> memoryview:
        """Bytes of the payload. Raises `ParcelError` if it has none there."""
        if not 0 <= start <= start + length <= len(self._payload):
            raise ParcelError(
                f"bytes {start} to {start + length} of a payload of {len(self._payload)} bytes"
            )
        return self._payload[start : start + length]

    def node(self, tree: Any) -> Any:
        """The value of a tree. Raises `ParcelError`, or whatever comes of a wrong one."""
        if isinstance(tree, list):
            name, *rest = cast(list[Any], tree)
            return _OPENERS[name](self, *rest)
        if type(tree) in (float, *PLAIN):
            return tree
        raise ParcelError(f"a batch holds a JSON {type(tree).__name__}")

    def kind(self, name: str) -> type:
        """A type that a batch is built of. Raises `ParcelError` if it is not known."""
        if name not in self._known:
            raise ParcelError(
                f"a batch holds {name}, which this process's own first batch does not: return the same types "
                "in every batch"
            )
        return self._known[name]


def _nan(_: Opener, text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def _complex(opener: Opener, real: Any, imaginary: Any) -> complex:
    return complex(opener.node(real), opener.node(imaginary))


def _bytes(opener: Opener, at: Sequence[int]) -> bytes:
    return bytes(opener.cut(*at))


def _range(_: Opener, start: int, stop: int, step: int) -> range:
    return range(start, stop, step)


def _tuple(opener: Opener, *nodes: Any) -> tuple[Any, ...]:
    return tuple(map(opener.node, nodes))


def _list(opener: Opener, *nodes: Any) -> list[Any]:
    return [opener.node(node) for node in nodes]


def _dict(opener: Opener, keys: Sequence[Any], *nodes: Any) -> dict[Any, Any]:
    return dict(zip(map(opener.node, keys), map(opener.node, nodes), strict=True))


def _ordered(opener: Opener, keys: Sequence[Any], *nodes: Any) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(opener, keys, *nodes))


def _named(opener: Opener, name: str, *nodes: Any) -> Any:
    kind: Any = opener.kind(name)
    if not issubclass(kind, tuple):
        raise ParcelError(f"{name} is no named tuple")
    return kind(*map(opener.node, nodes))


def _data(opener: Opener, name: str, *nodes: Any) -> Any:
    kind: Any = opener.kind(name)
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**dict(zip(names, map(opener.node, nodes), strict=True)))


def _tensor(
    opener: Opener,
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
        flat = torch.frombuffer(opener.cut(*at), dtype=torch.uint8).view(dtype)
    if strides is None:
        return flat.view(tuple(shape))
    if not is_dense(shape, strides):
        raise ParcelError(f"strides {strides} for shape {shape}")
    return torch.as_strided(flat, tuple(shape), tuple(strides))


def _array(
    opener: Opener,
    at: Sequence[int],
    dtype_name: str,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype_name)
    if dtype.kind not in NUMPY_KINDS:
        raise ParcelError(f"an array of dtype {dtype_name!r}")
    if not _count(shape, at[1], dtype.itemsize):
        return np.empty(tuple(shape), dtype)
    if strides is not None and not is_dense(shape, strides, dtype.itemsize):
        raise ParcelError(f"strides {strides} for shape {shape}")
    return np.ndarray(tuple(shape), dtype, opener.cut(*at), 0, strides)


def _scalar(opener: Opener, *rest: Any) -> Any:
    return _array(opener, *rest)[()]


def _count(shape: Sequence[int], length: int, itemsize: int) -> int:
    """How many elements there are. Raises `ParcelError` unless they need `length` bytes."""
    count = math.prod(shape)
    if min(shape, default=0) < 0 or length != count * itemsize:
        raise ParcelError(f"{length} bytes for shape {shape} with {itemsize} bytes per element")
    return count


_OPENERS: dict[str, Callable[..., Any]] = {
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
