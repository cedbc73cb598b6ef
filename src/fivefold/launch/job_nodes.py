"""The nodes of a job: which ranks each has, and what takes the place of one that is lost.

lost, or failures began there twice ──> a spare ──> none is left: fewer replicas on the others ──> the end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.cluster.network import resolve
from fivefold.errors import LaunchError
from fivefold.launch.job import Job
from fivefold.launch.output import LogLines
from fivefold.launch.restarts import FinalFailure
from fivefold.launch.shrinking import Shrinking
from fivefold.wire import Channel

__all__ = ["JobNode", "JobNodes", "NodeLost"]

_BLAMED = 2
"""failures that began on a node, after which it stands by"""


class NodeLost(LaunchError):
    """A node, or its agent, is gone; the ranks of the others were stopped."""

    def __init__(self, host: str, ranks: range, why: str, job: Job) -> None:
        self.host = host
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        others = "; the other ranks were stopped" if len(ranks) < job.processes else ""
        super().__init__(
            f"node {host} with {which} of {job.processes} was lost: {why}{others}\n"
            f"  logs of all ranks: {job.log_dir}/rank-*.log"
        )


@dataclass
class JobNode:
    """A node of the job."""

    number: int
    host: str
    ranks: range
    slots: int
    """how many ranks it has room for; 0 while it stands by"""
    cores: tuple[int, ...]
    python: str
    channel: Channel | None = None
    peer: str = ""
    """its address, as it called from there"""
    own: str = ""
    """ours, as it called there"""
    lost: str = ""
    """why it cannot be used; empty if it can"""
    blamed: list[str] = field(default_factory=list[str])
    """for what failures"""
    untaken_bytes: int = 0
    cleared: bool = False
    """whether its agent has ended what KILL was for"""
    flushed: bool = False
    """whether it has answered FLUSH"""
    logs: dict[int, tuple[LogLines, LogLines]] = field(
        default_factory=dict[int, tuple[LogLines, LogLines]]
    )


class JobNodes:
    """All of them, in the order of the job's list."""

    def __init__(self, job: Job) -> None:
        self._all: list[JobNode] = []
        first = 0
        for number, place in enumerate(job.nodes):
            ranks = range(first, first + place.ranks)
            self._all.append(
                JobNode(number, place.host, ranks, place.ranks, place.cores, place.python)
            )
            first += place.ranks

    def __iter__(self) -> Iterator[JobNode]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> JobNode:
        return self._all[number]

    def working(self) -> list[JobNode]:
        """Those with ranks, in the order of these."""
        return sorted((node for node in self._all if node.ranks), key=lambda one: one.ranks[0])

    def meeting_address(self) -> str:
        """Where the other nodes reach that of rank 0: as they reach the launcher, where it is the same."""
        used = self.working()
        if not used[0].peer.startswith("127."):
            return used[0].peer
        return next((node.own for node in used if not node.own.startswith("127.")), "127.0.0.1")

    def spares(self) -> list[JobNode]:
        """Those that stand by, those first on which the fewest failures began."""
        found = [node for node in self._all if not node.slots and not node.lost]
        return sorted(found, key=lambda node: len(node.blamed))

    def called(self, fields: Mapping[str, Any], peer: str) -> JobNode | None:
        """The node of an agent, by the number that it was told, its names or its address; None if none is."""
        awaited = [node for node in self._all if node.channel is None]
        if fields["number"] >= 0:
            return next((node for node in awaited if node.number == fields["number"]), None)
        names = {str(name) for name in fields["names"]}
        short = {name.partition(".")[0] for name in names}
        hosts = {node.number: node.host.rpartition("@")[2] for node in awaited}
        for node in awaited:
            if hosts[node.number] in names:
                return node
        for node in awaited:
            if hosts[node.number].partition(".")[0] in short:
                return node
        return next(
            (n for n in awaited if peer in (hosts[n.number], resolve(hosts[n.number]))), None
        )

    def blame(self, rank: int | None, what: str) -> None:
        """A failure began with a rank that did something."""
        for node in self._all:
            if rank in node.ranks:
                node.blamed.append(f"rank {rank} {what}")

    def replace_blamed(self, note: Callable[[str], object]) -> None:
        """Nodes on which failures began twice change places with spares on which fewer did.

        They stand by then: for a node that is lost, they are better than none.
        """
        for node in self.working():
            spares = [spare for spare in self.spares() if len(spare.blamed) < _BLAMED]
            if len(node.blamed) >= _BLAMED and spares:
                why = "; ".join(node.blamed)
                note(f"note: node {node.host} stands by, since failures began there: {why}")
                self._replace(node, spares[0], note)

    def _replace(self, node: JobNode, spare: JobNode, note: Callable[[str], object]) -> None:
        note(f"note: node {spare.host} takes the place of {node.host}")
        spare.ranks, node.ranks = node.ranks, range(0)
        spare.slots, node.slots = node.slots, 0

    def replace_lost(self, note: Callable[[str], object], shrinking: Shrinking | None) -> None:
        """Spares take the place of nodes that were lost, or the others do without them.

        Raises `FinalFailure` if that leaves too few.
        """
        spares = self.spares()
        for node in self.working():
            if node.lost and spares:
                self._replace(node, spares.pop(0), note)
        if left := [node for node in self.working() if node.lost]:
            self._do_without(left, note, shrinking)

    def _do_without(
        self, lost: Sequence[JobNode], note: Callable[[str], object], shrinking: Shrinking | None
    ) -> None:
        why = f"no spare is left for node {lost[0].host}: {lost[0].lost}"
        if shrinking is None:
            raise FinalFailure(why)
        for node in lost:
            node.ranks, node.slots = range(0), 0
        kept = [node for node in self._all if node.slots and not node.lost]
        room = sum(node.slots for node in kept)
        world = shrinking.world(room)
        used = sum(1 for n in range(len(kept)) if sum(one.slots for one in kept[:n]) < world)
        if used < shrinking.nodes or not world:
            few = (
                f"{_many(used, 'node')} would work, fewer than --min-nodes"
                if world
                else f"a replica needs {shrinking.replica}"
                + ", and no --smaller-plan is for so few" * bool(shrinking.smaller)
            )
            left = f"{_many(room, 'rank')} on {_many(len(kept), 'node')}"
            raise FinalFailure(f"{why}; left: {left}; {few}")
        first = 0
        for node in kept:
            node.ranks = range(first, min(first + node.slots, world))
            first = node.ranks.stop
        on = f"{_many(world, 'rank')} on {_many(len(self.working()), 'node')}"
        note(f"note: {why}; the run goes on with {on}")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
