"""Counters of the kernel that are read again and again: files stay open; what cannot be read is None."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fivefold.cluster.cores import control_groups
from fivefold.cluster.energy import energy

__all__ = ["EnergyCounter", "Network", "OpenFile", "Resident", "RunDelay", "Throttled"]

_MOST_BYTES = 64 << 10
_INFINIBAND = 32
"""if_arp.h: what an interface over InfiniBand sends is in the counters of its port as well"""
_WORDS = re.compile(rb"^(throttled_time|throttled_usec) (\d+)$", re.MULTILINE)


class OpenFile:
    """A file of /proc or /sys, read from its beginning each time."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self, most_bytes: int = 256) -> bytes | None:
        """What it holds now."""
        if self._fd < 0:
            return None
        try:
            return os.pread(self._fd, most_bytes, 0)
        except OSError:
            return None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RunDelay:
    """How long a thread was ready and had no core, in ns: the second number of its schedstat."""

    def __init__(self, root: Path, thread: int) -> None:
        self._file = OpenFile(root / f"proc/self/task/{thread}/schedstat")
        self.close = self._file.close

    def read(self) -> int | None:
        """The sum since the thread began."""
        words = (self._file.read() or b"").split()
        return int(words[1]) if len(words) == 3 else None


class Throttled:
    """How long the control groups of this process had used up their share, in ns, both versions.

    The time of the group that stood longest counts: of one around another, both stand. A group of version 1
    adds up the cores that it was stopped on.
    """

    def __init__(self, root: Path) -> None:
        self._files = [OpenFile(path) for path in _once(_statistics(root))]

    def read(self) -> int | None:
        """The sum since the groups were made; None where there is no such group."""
        found: list[int] = []
        for file in self._files:
            if match := _WORDS.search(file.read(1024) or b""):
                unit = 1000 if match[1] == b"throttled_usec" else 1
                found.append(int(match[2]) * unit)
        return max(found, default=None)

    def close(self) -> None:
        """Give the descriptors back."""
        for file in self._files:
            file.close()


def _statistics(root: Path) -> list[Path]:
    return [folder / "cpu.stat" for folder in control_groups("cpu", root)]


def _once(paths: Iterable[Path]) -> list[Path]:
    """Those that exist, each file once: a group can be seen under several names."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            seen.setdefault((stat.st_dev, stat.st_ino), path)
    return list(seen.values())


class Resident:
    """Main memory that the process has in use now, in bytes."""

    def __init__(self, root: Path) -> None:
        self._file = OpenFile(root / "proc/self/statm")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self.close = self._file.close

    def read(self) -> int | None:
        """At this moment."""
        words = (self._file.read() or b"").split()
        return int(words[1]) * self._page_bytes if len(words) > 1 else None


class Network:
    """Bytes that the node has sent and received, the loopback apart.

    Those of interfaces with a device behind them (bridges and tunnels pass the same bytes on), or of all
    where none has one, as in a container; and those of InfiniBand ports, which no interface counts.
    """

    def __init__(self, root: Path) -> None:
        self._interfaces = OpenFile(root / "proc/self/net/dev")
        folder = root / "sys/class/net"
        counted = [path for path in _entries(folder) if _kind(path) != _INFINIBAND]
        real = {path.name for path in counted if (path / "device").exists()}
        self._names = real or {path.name for path in counted}
        ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/counters"))
        self._sent = [OpenFile(port / "port_xmit_data") for port in ports]
        self._received = [OpenFile(port / "port_rcv_data") for port in ports]

    def read(self) -> tuple[int, int] | None:
        """(sent, received) since the node started; None where the kernel does not tell."""
        text = self._interfaces.read(_MOST_BYTES)
        if text is None:
            return None
        sent, received = _words(self._sent), _words(self._received)
        for line in text.decode(errors="replace").splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if name.strip() in self._names - {"lo"} and len(numbers) >= 9:
                received += int(numbers[0])
                sent += int(numbers[8])
        return sent, received

    def close(self) -> None:
        """Give the descriptors back."""
        for file in (self._interfaces, *self._sent, *self._received):
            file.close()


def _words(files: Sequence[OpenFile]) -> int:
    """Ports of InfiniBand count words of four bytes."""
    return sum(4 * int(text) for file in files if (text := file.read()) and text.strip().isdigit())


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _kind(interface: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((interface / "type").read_text())
    return 0


class EnergyCounter:
    """Energy that the processors of the node have used, in joules, from RAPL.

    Packages and their memory are added up; cores are part of a package, and a platform has packages in it.
    """

    def __init__(self, root: Path) -> None:
        found = energy(root)
        zones = dict(zip(map(Path, found.counters), found.names, strict=True))
        chosen = [p for p, name in zones.items() if name.startswith(("package", "dram"))]
        self.said = "packages and memory, by RAPL" if chosen else f"not available: {found.reason}"
        self._zones = [_Zone(path) for path in chosen]

    def read(self) -> float | None:
        """The sum since this object was made."""
        parts = [zone.read() for zone in self._zones]
        known = [part for part in parts if part is not None]
        return sum(known) / 1e6 if known and len(known) == len(parts) else None

    def close(self) -> None:
        """Give the descriptors back."""
        for zone in self._zones:
            zone.close()


class _Zone:
    """A counter of microjoules that begins again at 0 after its largest value, in minutes."""

    def __init__(self, path: Path) -> None:
        self._file = OpenFile(path)
        self.close = self._file.close
        self._range = _number((path.parent / "max_energy_range_uj").read_bytes()) or 0
        self._last = _number(self._file.read())
        self._sum = 0

    def read(self) -> int | None:
        now = _number(self._file.read())
        if now is None or self._last is None:
            return None
        self._sum += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._sum


def _number(text: bytes | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None
