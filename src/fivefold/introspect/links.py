"""Links between nodes as the kernel saw them while the run went on: notes of kind "links" of all ranks.

    in use    share of the time in which a rank had sent something that had not arrived
    speed     bytes over that time, without what the other side had no room for

A link that is slow is in use for long; a rank that comes late, or shares its core, leaves it idle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.introspect.run import TracedRun

__all__ = ["Way", "slowed", "ways"]

_IN_USE, _SLOW = 0.2, 0.5
"""share of the time, and of the others' median speed"""
_BYTES = 1 << 18
"""below which nothing is said of a link"""


@dataclass(frozen=True)
class Way:
    """From one node to another, in the latter half of the run."""

    hosts: tuple[str, str]
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    """on these nodes"""
    bytes: int
    busy_s: float
    in_use: float
    """of the rank that uses it most"""

    @property
    def bytes_per_s(self) -> float:
        """While it is in use."""
        return self.bytes / max(self.busy_s, 1e-9)

    @property
    def text(self) -> str:
        """For a sentence."""
        ends = [
            f"{host} (rank {ranks[0]})" if len(ranks) == 1 else host
            for host, ranks in zip(self.hosts, self.ranks, strict=True)
        ]
        return f"from {ends[0]} to {ends[1]}"


def slowed(run: TracedRun) -> tuple[Way, float | None] | None:
    """The slow one, and the median speed of the others; None if none stands out.

    Between two nodes there is no other to compare with: the one that is in use most is taken.
    """
    found = ways(run)
    used = sorted((way for way in found if way.in_use >= _IN_USE), key=lambda way: -way.in_use)
    for way in used:
        others = [other.bytes_per_s for other in found if set(other.hosts) != set(way.hosts)]
        if not others:
            return way, None
        usual = float(np.median(others))
        if way.bytes_per_s < _SLOW * usual:
            return way, usual
    return None


def ways(run: TracedRun) -> list[Way]:
    """All between nodes whose ranks were read, as far as enough was sent."""
    hosts = {trace.rank: str(trace.meta.get("host") or "") for trace in run.ranks}
    notes = {trace.rank: _told(trace.notes) for trace in run.ranks}
    host_of = {
        str(address): hosts[rank]
        for rank, told in notes.items() for note in told for address in note.get("own") or []
    }  # fmt: skip
    sent: dict[tuple[str, str], list[tuple[int, int, float, float]]] = defaultdict(list)
    for rank, told in notes.items():
        for to, size, busy_s, in_use in _lately(told):
            if to in host_of and host_of[to] != hosts[rank]:
                sent[hosts[rank], host_of[to]].append((rank, size, busy_s, in_use))
    on = {host: tuple(r for r, h in hosts.items() if h == host) for host in hosts.values()}
    return [
        Way(ends, (on[ends[0]], on[ends[1]]), sum(p[1] for p in parts), sum(p[2] for p in parts),
            max(p[3] for p in parts))
        for ends, parts in sent.items() if sum(p[1] for p in parts) >= _BYTES
    ]  # fmt: skip


def _told(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [
        note for note in notes if note["kind"] == "links" and isinstance(note.get("step"), int)
    ]
    return sorted(found, key=lambda note: note["step"])


def _lately(told: list[dict[str, Any]]) -> list[tuple[str, int, float, float]]:
    """Address, bytes, busy time, share of the time in use: from the middle of the run to the last note."""
    if len(told) < 2:
        return []
    last = told[-1]
    first = next((n for n in reversed(told[:-1]) if 2 * n["step"] <= last["step"]), told[0])
    seconds = (last["at_ns"] - first["at_ns"]) / 1e9
    before = {peer["to"]: peer for peer in first["peers"]}
    found: list[tuple[str, int, float, float]] = []
    for peer in last["peers"]:
        was = before.get(peer["to"])
        if was is None or seconds <= 0:
            continue
        size = int(peer["bytes"] - was["bytes"])
        busy_s = float(peer["busy_s"] - was["busy_s"] - (peer["kept_s"] - was["kept_s"]))
        # New connections instead of old ones count from nothing again.
        if size > 0 and busy_s > 0:
            found.append((str(peer["to"]), size, busy_s, busy_s / seconds))
    return found
