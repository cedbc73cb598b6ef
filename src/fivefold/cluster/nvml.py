"""What NVIDIA's management library tells of the GPUs that this process may see (extra `gpu`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

__all__ = ["Told", "devices", "short_address"]


@dataclass(frozen=True)
class Told:
    """What NVML says of one GPU."""

    name: str
    uuid: str
    memory_bytes: int


def devices() -> dict[str, Told]:
    """All GPUs by PCI address (0000:17:00.0); empty without NVML, whatever the reason.

    The address in NVML has eight digits of a domain and capital letters.
    """
    try:
        import pynvml as library
    except ImportError:
        return {}
    nvml: Any = library
    found: dict[str, Told] = {}
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                address = _said(nvml.nvmlDeviceGetPciInfo(handle).busId)
                found[short_address(address)] = _device(nvml, handle)
        finally:
            nvml.nvmlShutdown()
    return found


def _device(nvml: Any, handle: Any) -> Told:
    return Told(
        name=_said(nvml.nvmlDeviceGetName(handle)),
        uuid=_said(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


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
