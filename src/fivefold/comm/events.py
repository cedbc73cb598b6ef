"""Ranges in the timeline of torch.profiler: operation, bytes, and what they are for.

While nothing is recorded, all that is done is to look at a flag of torch's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from fivefold.torch_private import is_profiling

__all__ = ["event"]

_NOTHING = nullcontext()


def event(operation: str, size_bytes: int | None, tag: str) -> AbstractContextManager[object]:
    """The body of a `with` as a range, such as "fivefold:all_reduce 4096 bytes, loss".

    Size and tag are parts of the name, so that tables of the profiler add up each kind on its own.
    """
    if not is_profiling():
        return _NOTHING
    size = "" if size_bytes is None else f" {size_bytes} bytes"
    return profiler.record_function(f"fivefold:{operation}{size}{f', {tag}' if tag else ''}")
