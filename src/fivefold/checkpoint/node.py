"""What the first rank of a node does for it: its store, its agent, and how other nodes reach it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from fivefold.checkpoint.agent_client import Agent, Figures, OwnAgent, Protection
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.members import Members
from fivefold.checkpoint.pieces import Address
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.store import LocalStore
from fivefold.closing import Closing
from fivefold.errors import CheckpointError
from fivefold.wire import new_key, own_address

__all__ = ["RankNode"]

_Kind = TypeVar("_Kind", bound=Agent)
_FIGURES_S = 5.0
"""how long the agent may take to tell what it has done"""


class RankNode(Closing):
    """This rank's node. Every rank has one; the agent belongs to the first rank of the node.

    Args:
        store: of this node.
        members: all nodes.
        bytes_per_s: limit for encoding and rebuilding; None: no limit.
        timeout_s: how long a peer may be silent.
    """

    def __init__(
        self,
        store: LocalStore,
        members: Members,
        *,
        bytes_per_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.store, self.members = store, members
        self.key = b""
        self.addresses: Sequence[Address] = ()
        """of the agents, by node"""
        self._bytes_per_s, self._timeout_s = bytes_per_s, timeout_s
        self._agent: Agent | None = None
        self._own: OwnAgent | None = None
        self._started = False
        self._starting = threading.Lock()
        self._closed = False
        self.at_end: tuple[str, int] | None = None
        """persistent directory, and number of this start: for `Agent.at_end`"""
        self._knows_end = False
        self._used_cpu_s = 0.0

    @property
    def timeout_s(self) -> float:
        """How long a peer may be silent."""
        return self._timeout_s

    @property
    def agent(self) -> Agent:
        """Of this node; on its first rank only, after `start` or while `serving`."""
        found = self._agent or self._own
        assert found is not None, "only the first rank of a node has its agent"
        return found

    @contextlib.contextmanager
    def serving(self, ranks: Ranks) -> Generator[None]:
        """Meanwhile first ranks do themselves what agents do. Collective; `CheckpointError` as `start`.

        A run that goes on needs little of that, and does not wait for processes to start.
        """
        try:
            if not self.addresses:
                self._meet(ranks, self._become)
            yield
        finally:
            if self._own is not None:
                self._own.close()
                self._own = None
            if not self._started:
                self.addresses = ()

    def start(self, ranks: Ranks) -> None:
        """Start the agents, or those that have ended, and tell them of each other. Collective.

        Raises `CheckpointError` on every rank if one does not start.
        """
        gone = self._agent is not None and self._agent.gone
        informed = self.at_end is None or self._knows_end
        told = ranks.agree(
            "looking after the checkpoint agents", lambda: {"gone": gone, "informed": informed}
        )
        well = all(one["informed"] and not one["gone"] for one in told)
        if self._started and well:
            return
        self._meet(ranks, self._begin)
        self._started = True
        ranks.agree("telling the checkpoint agents of each other", self._inform)
        self._knows_end = self.at_end is not None

    def _inform(self) -> dict[str, object]:
        if not self.members.leads:
            return {}
        agent = self.agent
        try:
            agent.peers(dict(enumerate(self.addresses))).result(self._timeout_s)
            if self.at_end is not None:
                agent.at_end(self.at_end[0], self.members.me, self.at_end[1]).result(
                    self._timeout_s
                )
        except TimeoutError:
            raise CheckpointError("the checkpoint agent does not answer") from None
        return {}

    def _meet(self, ranks: Ranks, begin: Callable[[], Agent]) -> None:
        self.key = self.key or ranks.from_first(new_key() if ranks.rank == 0 else None)
        told = ranks.agree(
            "starting the checkpoint agents",
            lambda: {"address": begin().address} if self.members.leads else {},
        )
        self.addresses = [
            (str(told[rank]["address"][0]), int(told[rank]["address"][1]))
            for rank in self.members.leaders
        ]

    def _become(self) -> Agent:
        self._own = self._made(OwnAgent)
        return self._own

    def _begin(self) -> Agent:
        if self._agent is not None and self._agent.gone:
            self._agent.close()
            self._agent = None
        with self._starting:  # a thread of saves may be left when the run has ended with an error
            if self._closed:
                raise CheckpointError("the run has ended")
            self._agent = self._agent or self._made(Agent)
            return self._agent

    def _made(self, kind: type[_Kind]) -> _Kind:
        assert self.store.run is not None
        return kind(
            self.store.root.parent,
            self.store.run,
            self.key,
            host=own_address() if len(self.members.hosts) > 1 else "127.0.0.1",
            bytes_per_s=self._bytes_per_s,
            timeout_s=self._timeout_s,
        )

    def protect(self, manifest: Manifest) -> Future[Protection] | None:
        """Begin to make what this node keeps for the others of its set; None where that is nothing."""
        if not self.members.leads or manifest.scheme == "single":
            return None
        return self.agent.protect(manifest.name)

    def flush(self, name: str, url: str, bytes_per_s: float | None) -> Future[Copied] | None:
        """Begin to copy this node's payload of a generation to the persistent level."""
        if not self.members.leads:
            return None
        return self.agent.flush(
            name,
            url,
            [self.members.me],
            metadata=self.members.me == 0,
            bytes_per_s=bytes_per_s,
        )

    def figures(self) -> Figures | None:
        """What the agent has done so far; None on other ranks, and where it gives no answer."""
        if self._agent is None:
            return None
        try:
            return self._agent.figures().result(_FIGURES_S)
        except (CheckpointError, TimeoutError):
            return None

    def used_cpu_s(self) -> float:
        """Processor time that the agent has used since the last call, copies apart; 0 on other ranks."""
        if (figures := self.figures()) is None:
            return 0.0
        before, self._used_cpu_s = self._used_cpu_s, figures.cpu_s - figures.flush_cpu_s
        # An agent that was started again begins at 0.
        return self._used_cpu_s - (before if before <= self._used_cpu_s else 0.0)

    def hurry(self) -> None:
        """Let the agent copy without limit from now on."""
        if self._agent is not None:
            self._agent.hurry()

    def homes(self, nodes: Mapping[int, int]) -> dict[int, Address]:
        """Addresses by member, from the nodes that answer for them."""
        return {member: self.addresses[node] for member, node in nodes.items()}

    def close(self, *, failed: bool = False) -> None:
        """End the agent; or, where the ranks have `failed`, leave it as `Agent.leave` does."""
        with self._starting:
            self._closed = True
            agent, self._agent = self._agent, None
        if agent is not None:
            (agent.leave if failed else agent.close)()
        self._started, self.addresses = False, ()
