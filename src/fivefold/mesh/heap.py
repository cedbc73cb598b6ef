"""Freed memory of the C library, which training asks for again in the next step, or has no room for."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

__all__ = ["give_back", "keep_memory", "resident_bytes", "return_blocks"]


def keep_memory() -> None:
    """Let the C library keep freed memory for the next step instead of giving it back to the system.

    By default it returns large blocks, and the system hands out zeroed pages for them in every step anew:
    up to 19,000 page faults per step of ResNet-20, or none, as the heap happens to lie. What the user has
    set stays.
    """
    _set({_TRIM_THRESHOLD: 1 << 30, _MMAP_THRESHOLD: 32 << 20})  # the most that glibc takes


def return_blocks() -> None:
    """Let the C library give large blocks back as soon as they are freed, until `keep_memory`.

    Where memory is short: what it keeps between blocks that stay adds up to more than these.
    """
    _set({_MMAP_THRESHOLD: 1 << 20})


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def _set(options: dict[int, int]) -> None:
    """Of glibc, unless the user has chosen how memory is kept."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option, value in options.items():
            library.mallopt(option, value)


def give_back() -> None:
    """Let the system have whole pages that are kept and not used, wherever they lie."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def resident_bytes() -> int:
    """What this process takes of the machine's memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
