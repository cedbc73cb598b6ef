"""What decides the bytes that a process computes: versions of libraries, and the kind of machine."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

__all__ = ["differences", "versions"]

_PACKAGES = {"fivefold": "Fivefold", "torch": "torch", "numpy": "numpy", "pillow": "Pillow"}
_NAMES = {**_PACKAGES, "machine": "machine", "cpu": "CPU capability", "byteorder": "byte order"}


@functools.cache
def _found() -> tuple[tuple[str, str], ...]:
    import torch

    found: list[tuple[str, str]] = []
    for package in _PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            found.append((package, "none"))
    found.append(("machine", platform.machine()))
    found.append(("cpu", torch.backends.cpu.get_cpu_capability()))
    found.append(("byteorder", sys.byteorder))
    return tuple(found)


def versions() -> dict[str, str]:
    """Of this process: Fivefold, torch, numpy and Pillow ("none" if absent), machine, CPU capability.

    The CPU capability is what torch's kernels use, such as AVX512. Batches of two processes are the same
    byte for byte where all of these are the same; otherwise they usually are.
    """
    return dict(_found())


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs, for people: `["torch 2.13.0 here, 2.11.0 there"]`.

    >>> differences({"torch": "2.13.0", "cpu": "AVX2"}, {"torch": "2.11.0", "cpu": "AVX2"})
    ['torch 2.13.0 here, 2.11.0 there']
    """
    names = [*_NAMES, *sorted({*mine, *theirs} - {*_NAMES})]
    return [
        f"{_NAMES.get(name, name)} {mine.get(name, 'unknown')} here, {theirs.get(name, 'unknown')} there"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]
