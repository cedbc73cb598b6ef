"""Finding the save to go on from, over all nodes and levels, and getting at its files.

every node tells what it has ──► the newest save that is whole or can be rebuilt ──► its bytes are read
     ▲                                                                                       │
     └──────────────── a file is damaged: what is there now? ◄───────────────────────────────┘
missing members are rebuilt ──► files are read here, from other nodes, or from the persistent level
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, BinaryIO

from fivefold.checkpoint.agent_client import Protection
from fivefold.checkpoint.inventory import PERSISTENT, Holding, Inventory, stocktaking
from fivefold.checkpoint.manifest import Item, Manifest
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.pieces import MOST_BYTES, PieceClient, Stretch
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.recovery_plan import RecoveryChoice, RecoveryPlan, choose
from fivefold.checkpoint.run import Run
from fivefold.checkpoint.store import PersistentStore, check
from fivefold.closing import Closing
from fivefold.errors import CheckpointError

__all__ = ["Pieces", "Recovery"]

_LOOK_S = 3600.0
"""how long a node may take to read what it has of one save"""


class Recovery:
    """The search for a save; all methods are collective. `node` has its agent."""

    def __init__(self, ranks: Ranks, node: RankNode, persistent: PersistentStore, run: Run) -> None:
        self._ranks, self._node, self._persistent = ranks, node, persistent
        self._run = run
        self._inventories: list[Inventory] = []
        self._looked: set[str] = set()
        """saves of which every node has read its files"""
        self._read: set[str] = set()
        """files of the persistent level that were read"""
        self.completed = ""
        """the newest save of the run that a node knows to be protected or flushed; of `find`"""

    def find(self, failed: Mapping[str, str]) -> RecoveryChoice:
        """The newest save whose files are as they were saved, those of `failed` left out."""
        if not self._inventories:
            self._inventories = self._stock()
            self.completed = self._newest_completed() or self.completed
        while True:
            choice = choose(
                self._inventories,
                holds=self._run.holds,
                failed=failed,
            )
            if choice.plan is None:
                return choice
            manifest = choice.plan.manifest
            far = [name for name, place in choice.plan.sources.items() if place == PERSISTENT]
            unread = [name for name in far if f"{manifest.name}/{name}" not in self._read]
            if manifest.name in self._looked and not unread:
                return choice
            self._examine(manifest, unread)

    def rebuild(self, plan: RecoveryPlan) -> int:
        """Make lost members' files whole; how many there were. Raises `CheckpointError`."""
        homes = self._node.homes(plan.homes)

        def rebuild_here() -> dict[str, Any]:
            mine = [task for task in plan.tasks if task.node == self._node.members.me]
            if self._node.members.leads:
                for task in mine:
                    self._node.agent.rebuild(plan.manifest, task, homes).result(_LOOK_S)
            return {}

        self._ranks.agree(f"rebuilding {plan.manifest.name}", rebuild_here)
        self._inventories, self._looked = [], set()  # nodes have more than they told
        return len(plan.tasks)

    def protect(self, plan: RecoveryPlan) -> None:
        """Let nodes that came without it keep again what protects the others, once `rebuild` is done.

        Raises `CheckpointError`: some could not; all that was loaded stays good.
        """
        if not plan.bare:
            return
        members, store = self._node.members, self._node.store
        homes = self._node.homes({**plan.homes, **{t.member: t.node for t in plan.tasks}})

        def begin() -> Future[Protection] | None:
            mine = members.leads and members.me in plan.bare.values()
            return self._node.agent.protect(plan.manifest.name, homes) if mine else None

        made = self._ranks.agree_later(f"protecting {plan.manifest.name} again", begin)

        def settle() -> dict[str, Any]:
            if made is not None and made.problem:
                raise CheckpointError(made.problem)
            generation = store.find(plan.manifest.name)
            if made is not None and generation is not None:
                store.advance(generation, "protected", made.redundancy)
            return {}

        self._ranks.agree(f"protecting {plan.manifest.name} again", settle)

    def _newest_completed(self) -> str:
        known = [
            holding.manifest
            for one in self._inventories
            for holding in one.holdings
            if holding.manifest.state != "local"
            and self._run.holds(holding.manifest.step, holding.manifest.epoch)
        ]
        newest = max(known, key=lambda manifest: (manifest.epoch, manifest.step), default=None)
        return "" if newest is None else newest.name

    def _stock(self) -> list[Inventory]:
        """What every node and the persistent level have, by presence and length."""
        found = self._told(())
        manifests = {h.manifest.name: h.manifest for one in found for h in one.holdings}
        if any(name in manifests for one in found for name in one.broken or {}):
            found = self._told(tuple(manifests.values()))
        return found

    def _told(self, elsewhere: Sequence[Manifest]) -> list[Inventory]:
        members = self._node.members

        def tell() -> dict[str, Any]:
            here: dict[str, Any] = {}
            if members.leads:
                looking = self._node.agent.inventory(members.me, deep=False, elsewhere=elsewhere)
                here["node"] = looking.result(_LOOK_S).to_json()
            if self._ranks.rank == 0:
                far = stocktaking(self._persistent, PERSISTENT, deep=False, elsewhere=elsewhere)
                here["far"] = far.to_json()
            return here

        told = self._ranks.agree("looking for checkpoints", tell)
        return [Inventory.parse(text) for one in told for text in one.values()]

    def _examine(self, manifest: Manifest, unread: Collection[str]) -> None:
        """Let every node read its files of a save, and all ranks together those of the persistent level."""
        members, size = self._node.members, self._ranks.size
        items = [item for item in _all_items(manifest) if item.name in unread]
        first_look = manifest.name not in self._looked

        def look() -> dict[str, Any]:
            told: dict[str, Any] = {}
            if members.leads and first_look:
                held = self._node.agent.look(manifest, deep=True).result(_LOOK_S)
                told["held"] = held.to_dict()
            mine = items[self._ranks.rank :: size]
            told["bad"] = [p.name for p in check(self._persistent.place, manifest.name, mine)]
            return told

        told = self._ranks.agree(f"reading {manifest.name}", look)
        bad = {name for one in told for name in one["bad"]}
        if first_look:
            for number, rank in enumerate(members.leaders):
                self._replace(number, manifest, Holding.of_dict(told[rank]["held"]))
        for one in self._inventories:
            for holding in one.holdings if one.node == PERSISTENT else ():
                if holding.manifest.same_save(manifest):
                    self._replace(PERSISTENT, manifest, replace(holding, good=holding.good - bad))
        self._looked.add(manifest.name)
        self._read |= {f"{manifest.name}/{name}" for name in unread}

    def _replace(self, node: int, manifest: Manifest, held: Holding) -> None:
        """Know better what a place has of a save."""
        self._inventories = [
            replace(
                one,
                holdings=tuple(held if h.manifest.same_save(manifest) else h for h in one.holdings),
            )
            if one.node == node
            else one
            for one in self._inventories
        ]


def _all_items(manifest: Manifest) -> list[Item]:
    return [manifest.metadata, *(item for member in manifest.members for item in member.items)]


class Pieces(Closing):
    """The bytes of a save's files, from wherever they are. For one thread."""

    def __init__(self, node: RankNode, persistent: PersistentStore, plan: RecoveryPlan) -> None:
        self._node, self._persistent, self._plan = node, persistent, plan
        self._files: dict[str, BinaryIO] = {}
        self._clients: dict[int, PieceClient] = {}

    def read(self, name: str, start: int, length: int) -> bytes:
        """Some bytes of a file. Raises `CheckpointError` or `OSError`."""
        place = self._plan.sources.get(name)
        if place is None:
            raise CheckpointError(f"{self._plan.manifest.name} has no file {name!r}")
        if place in (self._node.members.me, PERSISTENT):
            file = self._file(name, far=place == PERSISTENT)
            file.seek(start)
            data = file.read(length)
        else:
            data = self._from_peer(place, name, start, length)
        if len(data) != length:
            raise CheckpointError(f"{name} of {self._plan.manifest.name} ends too early")
        return data

    def whole(self, item: Item) -> bytes:
        """All bytes of a file."""
        return self.read(item.name, 0, item.length)

    def _file(self, name: str, *, far: bool) -> BinaryIO:
        if name not in self._files:
            place = self._persistent.place if far else self._node.store.place
            self._files[name] = place.open(f"{self._plan.manifest.name}/{name}")
        return self._files[name]

    def _from_peer(self, node: int, name: str, start: int, length: int) -> bytes:
        manifest = self._plan.manifest
        if node not in self._clients:
            self._clients[node] = PieceClient(
                self._node.addresses[node], self._node.key, timeout_s=self._node.timeout_s
            )
        room = bytearray(length)
        view = memoryview(room)
        for at in range(0, length, MOST_BYTES):
            count = min(MOST_BYTES, length - at)
            wanted = Stretch(manifest.name, manifest.save, "file", 0, name, start + at, count)
            if len(self._clients[node].read(wanted, view[at : at + count])) < count:
                return b""
        return bytes(room)

    def close(self) -> None:
        """Hang up, and close files."""
        for file in self._files.values():
            file.close()
        for client in self._clients.values():
            client.close()
        self._files, self._clients = {}, {}
