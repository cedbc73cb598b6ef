"""Use, memory and energy of this rank's GPU, from NVIDIA's management library (extra `gpu`)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from fivefold.cluster.gpus import gpus, visible
from fivefold.cluster.nvml import short_address

__all__ = ["GpuUse", "Used"]


@dataclass(frozen=True)
class Used:
    """One reading."""

    busy: float
    """share of the last moments in which a kernel ran, 0 to 1"""
    memory_bytes: int
    """in use on the device, by this process where the library tells it apart"""
    energy_j: float
    """since the driver was loaded; nan if the device does not count"""


class GpuUse:
    """The GPU that is number `index` of those that this process may use. `said` tells why there is none."""

    def __init__(self, index: int) -> None:
        self.said = ""
        self._nvml: Any = None
        self._device: Any = None
        found = [gpu for gpu in visible(gpus()) if gpu.vendor == "NVIDIA"]
        if index >= len(found):
            self.said = "not available: this process may use no GPU of NVIDIA"
            return
        try:
            import pynvml as library
        except ImportError:
            self.said = "not available: install fivefold[gpu]"
            return
        nvml: Any = library
        try:
            nvml.nvmlInit()
            self._device = _by_address(nvml, found[index].address)
        except nvml.NVMLError as problem:
            self.said = f"not available: {problem}"
            return
        self._nvml = nvml

    def read(self) -> Used | None:
        """At this moment; None where there is nothing to read."""
        if self._nvml is None:
            return None
        nvml, device = self._nvml, self._device
        try:
            busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            memory = _of_process(nvml, device)
            if memory is None:
                memory = int(nvml.nvmlDeviceGetMemoryInfo(device).used)
        except nvml.NVMLError:
            return None
        energy = float("nan")
        with contextlib.suppress(nvml.NVMLError):
            energy = nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
        return Used(busy, memory, energy)

    def close(self) -> None:
        """Let go of the library."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None


def _by_address(nvml: Any, address: str) -> Any:
    for number in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(number)
        told = nvml.nvmlDeviceGetPciInfo(device).busId
        if short_address(told.decode() if isinstance(told, bytes) else told) == address:
            return device
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)


def _of_process(nvml: Any, device: Any) -> int | None:
    """None in containers, where the library knows other process numbers, and where it does not tell."""
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None
