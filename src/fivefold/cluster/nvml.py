"""What NVIDIA's management library tells of the GPUs that this process may see (extra `gpu`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Slice", "Told", "computing", "devices", "short_address"]


@dataclass(frozen=True)
class Slice:
    """A part of a GPU as MIG divides it: a compute instance, which CUDA takes for a device."""

    uuid: str
    """MIG-..., by which CUDA_VISIBLE_DEVICES names it"""
    name: str
    gpu_instance: int
    compute_instance: int
    """number within its GPU instance"""
    memory_bytes: int | None
    """of its GPU instance; None if NVML does not tell"""


@dataclass(frozen=True)
class Told:
    """What NVML says of one GPU."""

    name: str
    uuid: str
    memory_bytes: int | None
    """None if NVML does not tell: of a GPU in slices, not everybody may know"""
    slices: tuple[Slice, ...] | None = None
    """those that there are; None where MIG does not divide it"""


def devices() -> dict[str, Told]:
    """All GPUs by PCI address (0000:17:00.0); empty without NVML, whatever the reason.

    The address in NVML has eight digits of a domain and capital letters.
    """
    found: dict[str, Told] = {}

    def ask(nvml: Any, handle: Any) -> None:
        address = _said(nvml.nvmlDeviceGetPciInfo(handle).busId)
        found[short_address(address)] = Told(
            name=_said(nvml.nvmlDeviceGetName(handle)),
            uuid=_said(nvml.nvmlDeviceGetUUID(handle)),
            memory_bytes=_memory(nvml, handle),
            slices=_slices(nvml, handle),
        )

    _of_each(ask)
    return found


def computing() -> dict[str, set[int]]:
    """By UUID of each GPU, which processes compute on it; empty without NVML, whatever the reason."""
    found: dict[str, set[int]] = {}

    def ask(nvml: Any, handle: Any) -> None:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found[_said(nvml.nvmlDeviceGetUUID(handle))] = {int(one.pid) for one in running}

    _of_each(ask)
    return found


def _of_each(ask: Callable[[Any, Any], None]) -> None:
    """Ask of each GPU, until NVML has no answer."""
    try:
        import pynvml as library
    except ImportError:
        return
    nvml: Any = library
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                ask(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        finally:
            nvml.nvmlShutdown()


def _memory(nvml: Any, handle: Any) -> int | None:
    with contextlib.suppress(nvml.NVMLError):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _slices(nvml: Any, handle: Any) -> tuple[Slice, ...] | None:
    """In the order of NVML, which numbers what there is and what there might be."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # a GPU, or a driver, that does not know of it
        return None
    found: list[Slice] = []
    for index in range(most):
        with contextlib.suppress(nvml.NVMLError):
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found.append(
                Slice(
                    uuid=_said(nvml.nvmlDeviceGetUUID(part)),
                    name=_said(nvml.nvmlDeviceGetName(part)),
                    gpu_instance=int(nvml.nvmlDeviceGetGpuInstanceId(part)),
                    compute_instance=int(nvml.nvmlDeviceGetComputeInstanceId(part)),
                    memory_bytes=_memory(nvml, part),
                )
            )
    return tuple(found)


def short_address(address: str) -> str:
    """An address as sysfs writes it.

    >>> short_address("00000000:17:00.0"), short_address("00010000:3B:00.0")
    ('0000:17:00.0', '10000:3b:00.0')
    """
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _said(told: str | bytes) -> str:
    """Older bindings give bytes."""
    return told.decode() if isinstance(told, bytes) else told
