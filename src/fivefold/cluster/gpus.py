"""The GPUs of a node, as the PCI bus shows them: they are there even if no driver or PyTorch uses them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.cluster import nvml, reading

__all__ = ["Gpu", "gpus", "visible"]

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
# VGA, 3D and other display controllers: NVIDIA's and AMD's accelerators are of the last two.
_CLASSES = (0x0300, 0x0302, 0x0380)
# A GPU inside a processor borrows main memory: less than this is its own.
_OWN_MEMORY_BYTES = 2 << 30
_SLICE = "MIG-"
# One after the other; of alternatives, separated by a space, the first that is set.
_CHOICE = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES"),
    "Intel": ("ZE_AFFINITY_MASK",),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    vendor: str
    """NVIDIA, AMD or Intel"""
    name: str
    """empty where neither the driver nor NVML tells"""
    address: str
    """on the PCI bus, such as 0000:17:00.0"""
    numa: int | None
    """number of the NUMA node it is attached to; None if the firmware does not tell"""
    memory_bytes: int | None
    driver: str
    """empty if none holds it"""
    uuid: str = ""
    integrated: bool = False
    """part of the processor, of no use for training"""
    granted: bool = True
    """whether this process may open it: Slurm and containers withhold GPUs that /sys shows all the same"""
    slices: tuple[nvml.Slice, ...] | None = None
    """what MIG has made of it, and CUDA takes for devices; None where it does not divide it"""

    @property
    def is_slice(self) -> bool:
        """Whether it is such a slice: then UUID, name and memory are its own, and all else the GPU's."""
        return self.uuid.startswith(_SLICE)


def gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """All GPUs of the node by address; NVML, where it is installed, adds what only it knows."""
    found = [
        gpu for path in reading.entries(root / "sys/bus/pci/devices") if (gpu := _gpu(path, root))
    ]
    if root == Path("/") and any(gpu.vendor == "NVIDIA" for gpu in found):
        told = nvml.devices()
        found = [_completed(gpu, told.get(gpu.address)) for gpu in found]
    return tuple(found)


def visible(found: Iterable[Gpu], environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Those that a process with this environment may use, in the order in which it counts them.

    Those that it was granted, less what CUDA_VISIBLE_DEVICES and its relatives leave out. Of a GPU that MIG
    divides these are its slices. CUDA shows a process the first of them alone, whatever else there is: who
    starts several processes names to each its own.
    """
    left = [gpu for gpu in found if gpu.granted and not gpu.integrated]
    for vendor, names in _CHOICE.items():
        for choice in names:
            told = next((environ[name] for name in choice.split() if name in environ), None)
            if told is not None:
                own = [gpu for gpu in left if gpu.vendor == vendor]
                left = [gpu for gpu in left if gpu.vendor != vendor] + _chosen(own, told)
    return tuple(part for gpu in left for part in _parts(gpu))


def _parts(gpu: Gpu) -> list[Gpu]:
    """What CUDA takes for devices."""
    if gpu.slices is None:
        return [gpu]
    whole = replace(gpu, slices=None)
    return [
        replace(whole, uuid=one.uuid, name=one.name, memory_bytes=one.memory_bytes)
        for one in gpu.slices
    ]


def _named_slices(own: Sequence[Gpu], word: str) -> list[Gpu]:
    """Those that a word may mean: the beginning of a UUID, or as drivers before 470 name a slice."""
    return [
        part
        for gpu in own
        for one, part in zip(gpu.slices or (), _parts(gpu), strict=False)
        if one.uuid.startswith(word)
        or word == f"{_SLICE}{gpu.uuid}/{one.gpu_instance}/{one.compute_instance}"
    ]


def _chosen(own: Sequence[Gpu], told: str) -> list[Gpu]:
    """As CUDA reads the list: numbers or beginnings of UUIDs, up to the first that is neither."""
    kept: list[Gpu] = []
    for word in filter(None, (part.strip() for part in told.split(","))):
        number = word.partition(".")[0]  # Intel: 0.1 is a tile of 0
        if number.isdecimal() and int(number) < len(own):
            named = [own[int(number)]]
        elif word.startswith(_SLICE):
            named = _named_slices(own, word)
        else:
            named = [gpu for gpu in own if gpu.uuid and gpu.uuid.startswith(word)]
        if len(named) != 1:
            break
        kept += [part for part in _parts(named[0]) if part not in kept]
    return kept


def _gpu(path: Path, root: Path) -> Gpu | None:
    kind, vendor = reading.number(path / "class"), reading.number(path / "vendor")
    if kind is None or vendor not in _VENDORS or kind >> 8 not in _CLASSES:
        return None
    maker, memory = _VENDORS[vendor], reading.number(path / "mem_info_vram_total")
    told = _of_driver(root, path.name)
    return Gpu(
        vendor=maker,
        name=told.get("Model", "") or reading.text(path / "product_name") or "",
        address=path.name,
        numa=reading.numa(path),
        memory_bytes=memory,
        driver=_driver(path),
        uuid="" if "?" in (uuid := told.get("GPU UUID", "")) else uuid,  # nobody has used it yet
        integrated=_integrated(maker, path.name, memory),
        granted=_granted(path, _driver(path), told.get("Device Minor", ""), root),
    )


def _granted(path: Path, driver: str, minor: str, root: Path) -> bool:
    """Whether the device may be opened. The kernel asks the control group when it is asked for access."""
    if driver == "nvidia":
        # A container sees /proc/driver/nvidia of the GPUs that were passed on to it alone.
        return bool(minor) and os.access(root / f"dev/nvidia{minor}", os.R_OK | os.W_OK)
    nodes = [one.name for one in reading.entries(path / "drm") if one.name.startswith("render")]
    return all(os.access(root / "dev/dri" / name, os.R_OK | os.W_OK) for name in nodes)


def _integrated(maker: str, address: str, memory: int | None) -> bool:
    if maker == "AMD":
        return memory is not None and memory < _OWN_MEMORY_BYTES
    # Intel's processors show theirs on bus 0, where no slot is.
    return maker == "Intel" and address.split(":")[1] == "00"


def _driver(path: Path) -> str:
    with contextlib.suppress(OSError):
        return (path / "driver").readlink().name
    return ""


def _of_driver(root: Path, address: str) -> dict[str, str]:
    """What NVIDIA's driver tells in /proc, such as `Model: NVIDIA H100 PCIe`."""
    told = reading.text(root / "proc/driver/nvidia/gpus" / address / "information") or ""
    pairs = (line.partition(":") for line in told.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _completed(gpu: Gpu, told: nvml.Told | None) -> Gpu:
    if told is None:
        return gpu
    return replace(
        gpu,
        name=gpu.name or told.name,
        uuid=gpu.uuid or told.uuid,
        memory_bytes=gpu.memory_bytes or told.memory_bytes,
        slices=told.slices,
    )
