"""The processors of a node: sockets, cores that share a core's parts, and the memory they are near to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fivefold.cluster import reading

__all__ = ["NumaNode", "Processors", "processors"]

# Implementers of ARM cores, and their parts, as far as DPUs and servers have them (the kernel shows numbers).
_ARM = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd4f"): "Neoverse-V2",
}


@dataclass(frozen=True)
class NumaNode:
    """Logical cores and the memory that is near to them."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Processors:
    """What the node has, whether or not it was granted to this process."""

    model: str
    """as the kernel names it; empty where it does not"""
    cpus: tuple[int, ...]
    """logical cores that are switched on"""
    cores: int
    """physical cores: logical ones that share their parts (SMT, hyper-threads) count once"""
    sockets: int
    numa: tuple[NumaNode, ...]
    """at least one"""

    @property
    def threads_per_core(self) -> int:
        """Logical cores per physical core."""
        return max(1, len(self.cpus) // self.cores)

    def numa_of(self, cpus: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the NUMA nodes that have any of these logical cores."""
        return tuple(node.number for node in self.numa if set(node.cpus) & set(cpus))


def processors(root: Path = Path("/")) -> Processors:
    """Read the processors of this node from sysfs. What a kernel does not tell counts as one of a kind."""
    folder = root / "sys/devices/system/cpu"
    cpus = reading.numbers(reading.text(folder / "online") or "") or _numbered(folder, "cpu")
    cores: set[tuple[int, str]] = set()
    sockets: set[int] = set()
    for cpu in cpus:
        topology = folder / f"cpu{cpu}" / "topology"
        # ARM kernels say -1 where the firmware does not tell.
        socket = max(0, reading.number(topology / "physical_package_id") or 0)
        sockets.add(socket)
        # Numbers of cores are unique in a socket at best; siblings are told by the list of both.
        cores.add((socket, reading.text(topology / "thread_siblings_list") or str(cpu)))
    model = _model(reading.text(root / "proc/cpuinfo") or "")
    return Processors(model, cpus, max(1, len(cores)), max(1, len(sockets)), _numa(root, cpus))


def _numa(root: Path, cpus: tuple[int, ...]) -> tuple[NumaNode, ...]:
    folder = root / "sys/devices/system/node"
    found: list[NumaNode] = []
    for number in _numbered(folder, "node"):
        own = reading.numbers(reading.text(folder / f"node{number}" / "cpulist") or "")
        size = _meminfo(reading.text(folder / f"node{number}" / "meminfo") or "")
        found.append(NumaNode(number, own, size))
    return tuple(found) or (NumaNode(0, cpus, 0),)


def _numbered(folder: Path, name: str) -> tuple[int, ...]:
    """The numbers of the folders cpu0, cpu1, ..."""
    tails = (path.name.removeprefix(name) for path in reading.entries(folder))
    return tuple(sorted(int(tail) for tail in tails if tail.isdecimal()))


def _meminfo(told: str) -> int:
    for line in told.splitlines():
        if "MemTotal:" in line:  # Node 0 MemTotal:  131072000 kB
            return int(line.split()[-2]) << 10
    return 0


def _model(cpuinfo: str) -> str:
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    arm = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    return fields.get("model name") or _ARM.get(arm, "ARM " + " ".join(arm) if arm[1] else "")
