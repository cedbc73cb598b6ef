"""Tensors as the C core sees them: a type, a number of elements, and an address."""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fivefold.arena.native import DTYPES

__all__ = ["CODES", "MARKS", "addresses", "beside", "counts", "is_reached", "reads", "writes"]

CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
"""what the core can reduce"""
MARKS: dict[torch.dtype, int] = {
    dtype: zlib.crc32(str(dtype).encode())
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""what tells a receiver whether a message is of its dtype; the same in every version of torch"""
_BYTES = DTYPES.index("uint8")


def code_of(tensor: Tensor) -> tuple[int, int]:
    """Code of the type, and how many of it an element is: what cannot be reduced travels as bytes."""
    code = CODES.get(tensor.dtype)
    return (_BYTES, tensor.element_size()) if code is None else (code, 1)


def is_reached(tensor: Tensor) -> bool:
    """Whether the core can read it, and write to it, where it is."""
    return tensor.is_cpu and tensor.is_contiguous()


def reads(tensor: Tensor) -> Tensor:
    """What is read from: the tensor, or a copy in one piece, in memory of the host.

    From a GPU it is copied once what its stream had to do before is done.
    """
    if is_reached(tensor):
        return tensor
    with torch.no_grad():
        return beside(tensor).copy_(tensor)


def writes(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None] | None]:
    """Where results go: the tensors, or copies as of `reads`; and what copies those back, if any.

    To a GPU they are copied in the stream that is current now, and are there when that returns.
    """
    if all(map(is_reached, tensors)):
        return [*tensors], None
    targets = [t if is_reached(t) else beside(t) for t in tensors]
    apart = [(own, to) for own, to in zip(targets, tensors, strict=True) if own is not to]
    device = next((t.device for t in tensors if t.is_cuda), None)
    stream = None if device is None else torch.cuda.current_stream(device)

    def copy_back() -> None:
        with torch.no_grad(), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for own, to in apart:
                to.copy_(own)

    return targets, copy_back


def beside(tensor: Tensor) -> Tensor:
    """New memory of the host for such a tensor, pinned for one of a GPU."""
    # A script may have set another default.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where each begins."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def counts(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """Numbers of elements."""
    return (ctypes.c_uint64 * len(numbers))(*numbers)
