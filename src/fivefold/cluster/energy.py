"""Counters of energy that this process may read. Where there are none, the reason; never a guess."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fivefold.cluster import reading

__all__ = ["Energy", "energy"]


@dataclass(frozen=True)
class Energy:
    """What can be read of the energy that the processors use, in microjoules."""

    counters: tuple[str, ...]
    """paths of readable counters"""
    names: tuple[str, ...]
    """what they count: package-0, dram, ..."""
    reason: str
    """why there is none; empty where there is one"""


def energy(root: Path = Path("/")) -> Energy:
    """Find the counters of RAPL, which processors of Intel and AMD have, in the kernel's powercap."""
    folder = root / "sys/class/powercap"
    zones = [path for path in reading.entries(folder) if path.name.startswith("intel-rapl:")]
    if not zones:
        return Energy((), (), "the kernel shows no energy counters (no RAPL, or a virtual machine)")
    counters: list[str] = []
    names: list[str] = []
    reason = ""
    for zone in zones:
        path = zone / "energy_uj"
        try:
            int(path.read_text())
        except (OSError, ValueError) as problem:
            said = problem.strerror if isinstance(problem, OSError) else "it holds no number"
            reason = f"{path} cannot be read: {said}"
            continue
        counters.append(str(path))
        names.append(reading.text(zone / "name") or zone.name)
    return Energy(tuple(counters), tuple(names), "" if counters else reason)
