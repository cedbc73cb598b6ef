"""Links between nodes as the kernel saw them while the run went on: notes of kind "links" of all ranks.

    in use    share of the time in which a rank had sent something that had not arrived
    speed     bytes over that time, without what the other side had no room for

A link that is slow is in use for long; a rank that comes late, or shares its core, leaves it idle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from fivefold.introspect.run import TracedRun

__all__ = ["Way", "ways"]

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
    steps: int

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


def ways(run: TracedRun) -> list[Way]:
    """All between nodes whose ranks were read, as far as enough was sent."""
    hosts = {trace.rank: str(trace.meta.get("host") or "") for trace in run.ranks}
    notes = {trace.rank: _told(trace.notes) for trace in run.ranks}
    host_of = {
        str(address): hosts[rank]
        for rank, told in notes.items() for note in told for address in note.get("own") or []
    }  # fmt: skip
    sent: dict[tuple[str, str], list[_Use]] = defaultdict(list)
    for rank, told in notes.items():
        for to, use in _lately(told):
            if to in host_of and host_of[to] != hosts[rank]:
                sent[hosts[rank], host_of[to]].append(use)
    on = {host: tuple(r for r, h in hosts.items() if h == host) for host in hosts.values()}
    return [
        Way(ends, (on[ends[0]], on[ends[1]]), sum(use.bytes for use in uses),
            sum(use.busy_s for use in uses), max(use.in_use for use in uses),
            max(use.steps for use in uses))
        for ends, uses in sent.items() if sum(use.bytes for use in uses) >= _BYTES
    ]  # fmt: skip


@dataclass(frozen=True)
class _Use:
    """Of one rank."""

    bytes: int
    busy_s: float
    in_use: float
    """share of the time"""
    steps: int


def _told(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [
        note for note in notes if note["kind"] == "links" and isinstance(note.get("step"), int)
    ]
    return sorted(found, key=lambda note: note["step"])


def _lately(told: list[dict[str, Any]]) -> list[tuple[str, _Use]]:
    """By address, from the middle of the run to the last note."""
    if len(told) < 2:
        return []
    last = told[-1]
    first = next((n for n in reversed(told[:-1]) if 2 * n["step"] <= last["step"]), told[0])
    seconds = (last["at_ns"] - first["at_ns"]) / 1e9
    before = {peer["to"]: peer for peer in first["peers"]}
    found: list[tuple[str, _Use]] = []
    for peer in last["peers"]:
        was = before.get(peer["to"])
        if was is None or seconds <= 0:
            continue
        size = int(peer["bytes"] - was["bytes"])
        busy_s = float(peer["busy_s"] - was["busy_s"] - (peer["kept_s"] - was["kept_s"]))
        # New connections instead of old ones count from nothing again.
        if size > 0 and busy_s > 0:
            steps = last["step"] - first["step"]
            found.append((str(peer["to"]), _Use(size, busy_s, busy_s / seconds, steps)))
    return found
