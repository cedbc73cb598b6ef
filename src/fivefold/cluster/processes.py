"""What the kernel says of a process of this node."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fivefold.cluster import reading

__all__ = ["ProcessStat", "handles", "process_stat"]


class ProcessStat(NamedTuple):
    """Some fields of /proc/PID/stat (proc_pid_stat(5))."""

    state: str
    """a letter: R runs, S sleeps, D waits for a disk, T is stopped, Z has ended"""
    parent: int
    group: int
    began: str
    """in ticks since the boot: tells it from later processes of this number, until the node boots again"""

    @property
    def ended(self) -> bool:
        """Whether it only waits to be collected: in a container that may never happen."""
        return self.state in "ZX"


def process_stat(pid: int, root: Path = Path("/")) -> ProcessStat | None:
    """What the kernel says of a process; None if there is none of that number, or it is hidden."""
    # The name, the second field, may hold anything; the rest follows its closing bracket.
    fields = (reading.text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessStat(fields[0], int(fields[1]), int(fields[2]), fields[19])


def handles(pid: int, signum: int, root: Path = Path("/")) -> bool:
    """Whether a process has a handler for a signal; where it can be seen (proc_pid_status(5))."""
    status = reading.text(root / f"proc/{pid}/status") or ""
    mask = next((line[7:] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (signum - 1) & 1)
