"""A batch as text and bytes; `decode` reverses it. Nothing is pickled, and no type is looked up by name.

    ({"image": uint8 (64, 3, 32, 32)}, [3, 1])
        fields   ["tuple", ["dict", ["image"], ["tensor", [0, 196608], "uint8", [64, 3, 32, 32]]], [...]]
        parts    the bytes of the tensor; every leaf begins at a multiple of 64

What arrives is byte for byte what was sent: values, dtypes, shapes, and the strides of tensors and arrays
that fill their memory (such as channels_last). Others, such as every second column, arrive contiguous.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.wire.frames import Buffer

__all__ = [
    "NUMPY_KINDS",
    "PLAIN",
    "Encoded",
    "Encoder",
    "encode",
    "is_dense",
    "types_in",
]

_ALIGNED = 64
NUMPY_KINDS = "biufcmMSU"
PLAIN = (type(None), bool, int, str)
_INLINE_BYTES = 1 << 16
"""a longer structure travels with the payload"""


class Encoded(NamedTuple):
    """A batch, ready to be sent: `fields, parts = encode(batch)`."""

    fields: dict[str, Any]
    """what `decode` needs: one entry, to be sent along with others"""
    parts: list[Buffer]
    """the payload; memory of the batch, so the batch must not change"""

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return sum(map(len, self.parts))

    def digest(self) -> str:
        """Equal for equal batches: structure, dtypes, shapes, strides and every byte."""
        state = xxhash.xxh3_128(json.dumps(self.fields).encode())
        for part in self.parts:
            state.update(part)
        return state.hexdigest()


def encode(batch: Any) -> Encoded:
    """A batch, ready to be sent.

    Raises:
        UsageError: it holds something that cannot travel; names the type and the remedy.
    """
    encoder = Encoder()
    try:
        tree = encoder.node(batch)
        text = json.dumps(tree, separators=(",", ":"))
    except RecursionError:
        raise UsageError(
            "a batch is nested too deeply, or holds itself: return a flat one"
        ) from None
    except ValueError as problem:  # an integer of more than 4,300 digits
        raise UsageError(f"a batch cannot be sent to another process: {problem}") from None
    if len(text) > _INLINE_BYTES:
        tree = encoder.part(memoryview(text.encode("ascii")))
        return Encoded({"batch": {"tree": tree}}, encoder.parts)
    return Encoded({"batch": tree}, encoder.parts)


def types_in(batch: Any) -> dict[str, type]:
    """The named tuples and dataclasses that a batch is built of: what `decode` may build."""
    found: dict[str, type] = {}
    waiting = [batch]
    while waiting:
        node = waiting.pop()
        if is_namedtuple(node) or is_dataclass(node):
            found[type_name(type(node))] = type(node)
        waiting.extend(_children(node))
    return found


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, (tuple, list)):
        yield from cast("tuple[Any, ...]", node)
    elif isinstance(node, dict):
        yield from cast("dict[Any, Any]", node)
        yield from cast("dict[Any, Any]", node).values()
    elif is_dataclass(node):
        yield from fields_of(node)


class Encoder:
    """Builds the tree of a batch, and lists its bytes."""

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        """leaves, each beginning at a multiple of 64, with zeros between them"""
        self._size = 0

    def part(self, data: Buffer) -> tuple[int, int]:
        """Add bytes; where they begin, and how many they are."""
        if not len(data):
            return 0, 0
        if gap := -self._size % _ALIGNED:
            self.parts.append(bytes(gap))
            self._size += gap
        start = self._size
        self.parts.append(data)
        self._size += len(data)
        return start, len(data)

    def node(self, value: Any) -> Any:
        """The tree of one value. Raises `UsageError` if it cannot travel."""
        kind: type = type(value)
        if kind in PLAIN:
            return value
        if (encode := _ENCODERS.get(kind)) is not None:
            return encode(self, value)
        if is_namedtuple(value):
            return ["named", type_name(kind), *map(self.node, value)]
        if is_dataclass(value):
            return ["data", type_name(kind), *map(self.node, fields_of(value))]
        if isinstance(value, np.generic):
            return ["scalar", *_elements(self, np.asarray(value))]
        raise _cannot(value)


def _sequence(encoder: Encoder, value: Sequence[Any]) -> Any:
    return [type(value).__name__, *map(encoder.node, value)]


def _mapping(encoder: Encoder, value: Mapping[Any, Any]) -> Any:
    return [
        type(value).__name__,
        list(map(encoder.node, value)),
        *map(encoder.node, value.values()),
    ]


def _float(_: Encoder, value: float) -> Any:
    # JSON has the shortest digits that give the same number; NaN has many bit patterns.
    return ["nan", struct.pack(">d", value).hex()] if math.isnan(value) else value


def _complex(encoder: Encoder, value: complex) -> Any:
    return ["complex", _float(encoder, value.real), _float(encoder, value.imag)]


def _bytes(encoder: Encoder, value: bytes) -> Any:
    return ["bytes", encoder.part(value)]


def _range(_: Encoder, value: range) -> Any:
    return ["range", value.start, value.stop, value.step]


def _tensor(encoder: Encoder, tensor: Tensor) -> Any:
    if (
        tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.requires_grad
    ):
        raise _cannot(tensor)
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
    data = cast("np.ndarray[Any, Any]", flat.view(torch.uint8).numpy()).data
    dtype, shape, strides = str(tensor.dtype), list(tensor.shape), list(tensor.stride())
    node = ["tensor", encoder.part(data), dtype.removeprefix("torch."), shape]
    return node if strides == _contiguous(shape) or 0 in shape else [*node, strides]


def _array(encoder: Encoder, array: np.ndarray[Any, Any]) -> Any:
    return ["array", *_elements(encoder, array)]


def _elements(encoder: Encoder, array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.kind not in NUMPY_KINDS:
        raise _cannot(array)
    if not is_dense(array.shape, array.strides, array.itemsize):
        array = array.copy("C")
    flat = np.lib.stride_tricks.as_strided(array, (array.size,), (array.itemsize,))
    data = flat.view(np.uint8).data if array.nbytes else b""
    shape, strides = list(array.shape), list(array.strides)
    node = [encoder.part(data), array.dtype.str, shape]
    plain = strides == _contiguous(shape, array.itemsize) or 0 in shape
    return node if plain else [*node, strides]


_ENCODERS: dict[type, Callable[[Encoder, Any], Any]] = {
    float: _float,
    complex: _complex,
    bytes: _bytes,
    range: _range,
    tuple: _sequence,
    list: _sequence,
    dict: _mapping,
    OrderedDict: _mapping,
    Tensor: _tensor,
    np.ndarray: _array,
}


def _cannot(value: Any) -> UsageError:
    """Why something cannot travel, and what to return instead."""
    remedy = (
        "return tensors, arrays, numbers, strings, None and bytes, in tuples, lists, dicts, named tuples or "
        "dataclasses"
    )
    what = type_name(type(value))
    if isinstance(value, Tensor):
        what, remedy = _about_tensor(value, what)
    elif isinstance(value, np.ndarray):
        what += f" of dtype {value.dtype}"
        remedy = "return an array of numbers, np.asarray(...), or a list"
    return UsageError(
        f"a batch holds {what}, which cannot be sent to another process: {remedy}; or switch "
        "offload.augmentation off"
    )


def _about_tensor(tensor: Tensor, what: str) -> tuple[str, str]:
    if type(tensor) is not Tensor:
        return f"a tensor of class {what}", "convert it with .as_subclass(torch.Tensor)"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}", "leave batches on the CPU; the loader moves them"
    if tensor.requires_grad:
        return "a tensor that requires a gradient", "detach it"
    return f"a tensor of layout {tensor.layout}, {tensor.dtype}", "return a plain, dense one"


def is_namedtuple(value: Any) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def is_dataclass(value: Any) -> bool:
    """Whether a value is a dataclass that its fields alone make."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
    )


def fields_of(value: Any) -> list[Any]:
    """The values of a dataclass."""
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def type_name(kind: type) -> str:
    """Module and name."""
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def is_dense(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> bool:
    """Whether elements fill their memory without gap or overlap, in whatever order of dims."""
    expected = unit
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _contiguous(shape: Sequence[int], unit: int = 1) -> list[int]:
    """The strides of rows one after the other."""
    strides, expected = [0] * len(shape), unit
    for dim in reversed(range(len(shape))):
        strides[dim] = expected
        expected *= shape[dim]
    return strides
