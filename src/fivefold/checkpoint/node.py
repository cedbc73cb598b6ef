"""What the first rank of a node does for it: its store, its agent, and how other nodes reach it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from fivefold.checkpoint.agent_client import Agent, Figures, Protection
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.members import Members
from fivefold.checkpoint.pieces import Address
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.store import LocalStore
from fivefold.closing import Closing
from fivefold.errors import CheckpointError
from fivefold.wire import new_key

__all__ = ["RankNode", "own_address"]

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
        self._root: Path | None = None
        """where agents of this node keep what is theirs"""
        self._agent: Agent | None = None
        self._used_cpu_s = 0.0

    @property
    def timeout_s(self) -> float:
        """How long a peer may be silent."""
        return self._timeout_s

    @property
    def agent(self) -> Agent:
        """Of this node; on its first rank only, after `start`."""
        assert self._agent is not None, "only the first rank of a node has its agent"
        return self._agent

    def start(self, ranks: Ranks, root: Path) -> None:
        """Start the agents, and tell them of each other. Collective; once is enough.

        Raises `CheckpointError` on every rank if one does not start.
        """
        if self.addresses:
            return
        self._root = root
        self.key = ranks.from_first(new_key() if ranks.rank == 0 else None)
        self._meet(ranks)

    def revive(self, ranks: Ranks) -> None:
        """Start agents again that have ended. Collective; `CheckpointError` as from `start`."""
        gone = self._agent is not None and self._agent.gone
        told = ranks.agree("looking after the checkpoint agents", lambda: {"gone": gone})
        if any(one["gone"] for one in told):
            self._meet(ranks)

    def _meet(self, ranks: Ranks) -> None:
        def begin() -> dict[str, object]:
            if not self.members.leads:
                return {}
            if self._agent is None or self._agent.gone:
                self._agent = self._begun()
            return {"address": self._agent.address}

        told = ranks.agree("starting the checkpoint agents", begin)
        self.addresses = [
            (str(told[rank]["address"][0]), int(told[rank]["address"][1]))
            for rank in self.members.leaders
        ]
        if self.members.leads:
            self.agent.peers(dict(enumerate(self.addresses))).result(self._timeout_s)

    def _begun(self) -> Agent:
        if self._agent is not None:
            self._agent.close()
        assert self.store.run is not None
        assert self._root is not None
        return Agent(
            self._root,
            self.store.run,
            self.key,
            host=own_address(len(self.members.hosts)),
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

    def close(self) -> None:
        """End the agent."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self.addresses = ()


def own_address(nodes: int) -> str:
    """The address of this host that the other nodes reach it by: the interface toward rank 0, if known."""
    toward = os.environ.get("MASTER_ADDR", "")
    if nodes == 1 or toward in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    # Connecting a datagram socket sends nothing; it only chooses the interface.
    for target in filter(None, (toward, "192.0.2.1")):  # the second is reserved (RFC 5737)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards,
        ):
            outwards.connect((target, 9))
            return str(outwards.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
