"""What the machine did during a step, for the row of `windows` that is being closed.

    at most every    read                                                             takes
    5 ms             processor time, core taken away, pages from disk                  2-4 us
    20 ms            main thread without a core, control group stopped, memory         5-10 us, cold 100 us
    0.5 s            bytes of the network, energy, GPU                                 50 us and more

Between two looks that take long lies a thousand times as long, up to 0.2 s. What a row is too short for is
counted in the next one that is read: sums over rows are right, single rows of less than 20 ms are smeared.
Where the machine does not tell, a row says -1 or nan, and `said` why.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fivefold.cluster.gpus import gpus, visible
from fivefold.cluster.nvml import short_address
from fivefold.trace.counters import EnergyCounter, Network, Resident, RunDelay, Throttled
from fivefold.trace.windows import Row

__all__ = ["GpuSource", "GpuUse", "Machine", "Used"]

_OFTEN_NS, _SOMETIMES_NS, _RARELY_NS = 5_000_000, 20_000_000, 500_000_000
_PAUSE, _LONGEST_NS = 1000, 200_000_000
"""times that a look takes, until the next one"""


class GpuSource(Protocol):
    """Where figures of the GPU come from."""

    said: str

    def read(self) -> Used | None:
        """Figures of this moment."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Machine:
    """A sampler of a `Trace`: call it with a row when a step ends. Belongs to the process that made it."""

    def __init__(
        self, thread: int, *, gpu: GpuSource | int | None = None, root: Path = Path("/")
    ) -> None:
        """`thread`: native id of the main thread; `gpu`: number of this rank's GPU, or None on CPUs."""
        self._delay, self._throttled = RunDelay(root, thread), Throttled(root)
        self._resident, self._network = Resident(root), Network(root)
        self._energy = EnergyCounter(root)
        self._gpu: GpuSource | None = GpuUse(gpu) if isinstance(gpu, int) else gpu
        self._use: Used | None = None
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._often = self._sometimes = self._rarely = time.monotonic_ns()
        self._pause_ns = 0
        self._last_cpu, self._last_switched, self._last_faults, self._peak_bytes = _process()
        self._last_delay, self._last_throttled = self._delay.read(), self._throttled.read()
        self._stood = False
        self._last_network, self._last_energy = self._network.read(), self._energy.read()
        self._rss = self._resident.read()
        if self._gpu is not None:
            self._use = self._gpu.read()

    @property
    def said(self) -> dict[str, str]:
        """For the meta of a trace: where figures come from, or why there are none."""
        told = {"energy": self._energy.said}
        if self._gpu is not None:
            told["gpu"] = self._gpu.said or "by NVML"
            if self._gpu_energy is not None:
                told["energy"] = f"this rank's GPU by NVML; processors: {self._energy.said}"
        if self._last_network is None:
            told["network"] = "not available: /proc/net/dev cannot be read"
        if self._last_delay is None:
            told["run_delay"] = "not available: the kernel keeps no schedstat of threads"
        if self._last_throttled is None:
            told["throttled"] = "not available: no control group of processors can be read"
        return told

    def __call__(self, row: Row) -> None:
        """Fill in what happened since the last row."""
        now = time.monotonic_ns()
        self._begin(row)
        if now - self._often >= _OFTEN_NS:
            self._often = now
            self._read_process(row)
        if now - self._sometimes >= max(_SOMETIMES_NS, self._pause_ns):
            self._sometimes = now
            self._read_files(row)
            self._pause_ns = min(_PAUSE * (time.monotonic_ns() - now), _LONGEST_NS)
        if self._rss is not None:
            row["rss_bytes"] = max(row["rss_bytes"], self._rss)
        if now - self._rarely >= _RARELY_NS:
            self._rarely = now
            self._read_node(row)
        if self._use is not None:
            row["gpu_bytes"] = max(row["gpu_bytes"], self._use.memory_bytes)
            row["gpu_busy"] = self._use.busy

    def close(self) -> None:
        """Give all descriptors back."""
        for source in (self._delay, self._throttled, self._resident, self._network, self._energy):
            source.close()
        if self._gpu is not None:
            self._gpu.close()

    def _read_process(self, row: Row) -> None:
        cpu, switched, faults, peak = _process()
        row["cpu_ns"] += cpu - self._last_cpu
        row["switched"] += switched - self._last_switched
        row["faults"] += faults - self._last_faults
        self._last_cpu, self._last_switched, self._last_faults = cpu, switched, faults
        if peak > self._peak_bytes:  # a new height, so it was reached since the last look
            self._peak_bytes = peak
            row["rss_bytes"] = peak

    def _read_files(self, row: Row) -> None:
        delay = self._delay.read()
        if delay is not None:
            row["run_delay_ns"] += delay - (self._last_delay or 0)
        self._last_delay = delay
        self._rss = self._resident.read()
        if self._stood:
            self._read_throttled(row)

    def _read_throttled(self, row: Row) -> None:
        """The kernel adds up over all cores to tell it: often only of a group that stood lately."""
        throttled = self._throttled.read()
        if throttled is not None:
            more = throttled - (self._last_throttled or 0)
            row["throttled_ns"] += more
            self._stood = more > 0
        self._last_throttled = throttled

    def _read_node(self, row: Row) -> None:
        self._read_throttled(row)
        network, energy = self._network.read(), self._energy.read()
        if network is not None and self._last_network is not None:
            row["sent_bytes"] += network[0] - self._last_network[0]
            row["received_bytes"] += network[1] - self._last_network[1]
        if energy is not None and self._last_energy is not None:
            row["energy_j"] += energy - self._last_energy
        self._last_network, self._last_energy = network, energy
        if self._gpu is not None:
            before = self._gpu_energy
            self._use = self._gpu.read()
            if before is not None and self._gpu_energy is not None:
                row["energy_j"] += self._gpu_energy - before

    def _begin(self, row: Row) -> None:
        """Sums begin at 0 where the machine tells them; the others stay unknown."""
        if self._last_network is not None:
            row["sent_bytes"] = row["received_bytes"] = 0
        if self._last_energy is not None or self._gpu_energy is not None:
            row["energy_j"] = 0.0
        if self._last_delay is None:
            row["run_delay_ns"] = -1
        if self._last_throttled is None:
            row["throttled_ns"] = -1

    @property
    def _gpu_energy(self) -> float | None:
        use = self._use
        return None if use is None or math.isnan(use.energy_j) else use.energy_j


def _process() -> tuple[int, int, int, int]:
    """Processor time in ns, times that a core was taken away, pages from disk, most memory ever in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = time.clock_gettime_ns(time.CLOCK_PROCESS_CPUTIME_ID)
    return cpu, used.ru_nivcsw, used.ru_majflt, used.ru_maxrss << 10


# ---- Use, memory and energy of this rank's GPU, from NVIDIA's management library (extra `gpu`)


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
