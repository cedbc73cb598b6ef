"""A batch to a tree of JSON values, and to the buffers that hold its bytes."""

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

from fivefold.errors import UsageError
from fivefold.helpers.messages import Buffer

__all__ = [
    "NUMPY_KINDS",
    "PLAIN",
    "Packer",
    "fields_of",
    "is_dataclass",
    "is_dense",
    "is_namedtuple",
    "type_name",
]

_ALIGNED = 64
NUMPY_KINDS = "biufcmMSU"
PLAIN = (type(None), bool, int, str)


class Packer:
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
        if (pack := _PACKERS.get(kind)) is not None:
            return pack(self, value)
        if is_namedtuple(value):
            return ["named", type_name(kind), *map(self.node, value)]
        if is_dataclass(value):
            return ["data", type_name(kind), *map(self.node, fields_of(value))]
        if isinstance(value, np.generic):
            return ["scalar", *_elements(self, np.asarray(value))]
        raise _cannot(value)


def _sequence(packer: Packer, value: Sequence[Any]) -> Any:
    return [type(value).__name__, *map(packer.node, value)]


def _mapping(packer: Packer, value: Mapping[Any, Any]) -> Any:
    return [type(value).__name__, list(map(packer.node, value)), *map(packer.node, value.values())]


def _float(_: Packer, value: float) -> Any:
    # JSON has the shortest digits that give the same number; NaN has many bit patterns.
    return ["nan", struct.pack(">d", value).hex()] if math.isnan(value) else value


def _complex(packer: Packer, value: complex) -> Any:
    return ["complex", _float(packer, value.real), _float(packer, value.imag)]


def _bytes(packer: Packer, value: bytes) -> Any:
    return ["bytes", packer.part(value)]


def _range(_: Packer, value: range) -> Any:
    return ["range", value.start, value.stop, value.step]


def _tensor(packer: Packer, tensor: Tensor) -> Any:
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
    node = ["tensor", packer.part(data), dtype.removeprefix("torch."), shape]
    return node if strides == _contiguous(shape) or 0 in shape else [*node, strides]


def _array(packer: Packer, array: np.ndarray[Any, Any]) -> Any:
    return ["array", *_elements(packer, array)]


def _elements(packer: Packer, array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.kind not in NUMPY_KINDS:
        raise _cannot(array)
    if not is_dense(array.shape, array.strides, array.itemsize):
        array = array.copy("C")
    flat = np.lib.stride_tricks.as_strided(array, (array.size,), (array.itemsize,))
    data = flat.view(np.uint8).data if array.nbytes else b""
    shape, strides = list(array.shape), list(array.strides)
    node = [packer.part(data), array.dtype.str, shape]
    plain = strides == _contiguous(shape, array.itemsize) or 0 in shape
    return node if plain else [*node, strides]


_PACKERS: dict[type, Callable[[Packer, Any], Any]] = {
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
