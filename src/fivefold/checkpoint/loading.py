"""Giving every object of a run the state of the newest save that can be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from fivefold.checkpoint import dcp
from fivefold.checkpoint.agent_client import Protection
from fivefold.checkpoint.files import crash_at
from fivefold.checkpoint.inventory import PERSISTENT, Holding, Inventory, stocktaking
from fivefold.checkpoint.manifest import Item, Manifest, generation_name
from fivefold.checkpoint.metadata import metadata_of
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.note import last_save, noted, read_note
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.pieces import MOST_BYTES, PieceClient, Stretch
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.recovery_plan import Passed, RecoveryChoice, RecoveryPlan, choose
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.state import Request, State, saved_in
from fivefold.checkpoint.store import PersistentStore, check
from fivefold.closing import Closing
from fivefold.errors import AllLost, CheckpointError, Unrecoverable, UsageError

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """From where a run goes on."""

    step: int
    epoch: int
    rebuilt: int
    """members whose files had to be made anew"""
    where: str
    """the save, as a path or URL, and on which nodes"""
    unflushed: Manifest | None = None
    """the save, where it is whole on its nodes and not in the persistent directory: a copy failed, say"""

    def __str__(self) -> str:
        nodes = f"{self.rebuilt} node{'s' if self.rebuilt > 1 else ''}"
        rebuilt = f"; the files of {nodes} were rebuilt" if self.rebuilt else ""
        return f"after step {self.step}, from {self.where}{rebuilt}"


@dataclass(frozen=True)
class _Loading:
    """What the functions below share."""

    ranks: Ranks
    node: RankNode
    opened: Opened
    state: State
    begin_again: bool
    warn: Callable[[str], None]

    @property
    def persistent(self) -> PersistentStore:
        """The directory that all nodes see."""
        return self.opened.store


def load(
    ranks: Ranks,
    node: RankNode,
    opened: Opened,
    *,
    state: State,
    begin_again: bool,
    warn: Callable[[str], None],
) -> Loaded | None:
    """Find the newest save, rebuild what is lost of it, and read it. None if there is none. Collective.

    Raises:
        Unrecoverable: what was whole when it was looked at could not be read.
        AllLost: there were saves, and none can be loaded, and nobody said to begin again then.
        UsageError: the save is of another model, or of a number of ranks that will not do.
    """
    loading = _Loading(ranks, node, opened, state, begin_again, warn)
    if not _any_left(ranks, node, opened.store):
        return _again(loading, "", ())
    with node.serving(ranks):
        return _load(loading)


def _load(loading: _Loading) -> Loaded | None:
    ranks, node, opened, warn = loading.ranks, loading.node, loading.opened, loading.warn
    persistent = opened.store
    crash_at("restarting")
    recovery = Recovery(ranks, node, persistent, opened.run)
    failed: dict[str, str] = {}
    avoided = _Avoided(opened.run.run)
    told: set[str] = set()
    while True:
        choice = avoided.find(recovery, failed)
        for passed in (*_forgotten(loading, choice), *choice.passed):
            if passed.name not in told:
                told.add(passed.name)
                warn(f"a newer save is passed over: {passed}")
        if choice.plan is None and failed:
            raise _unreadable(persistent, failed)
        if choice.plan is None:
            return _again(loading, recovery.completed, choice.passed)
        manifest = choice.plan.manifest
        recovery.begin(choice.plan)
        try:
            rebuilt = recovery.rebuild(choice.plan)
            request, read = _read(loading, choice.plan)
        except UsageError:
            raise
        except CheckpointError as problem:
            failed[manifest.name] = str(problem)
            continue
        _restore(loading, request, read)
        try:
            recovery.protect(choice.plan)
        except CheckpointError as problem:
            warn(f"{manifest.name} is loaded, and not protected: {problem}")
        where, unflushed = _where(loading, choice.plan), _unflushed(loading, choice.plan)
        return Loaded(manifest.step, manifest.epoch, rebuilt, where, unflushed)


class _Avoided:
    """Saves that may hold what makes the run fail; they are passed over as long as there is an older one."""

    def __init__(self, run: str) -> None:
        """`run`: its id. Once per process: what it saves later is not what made it fail before."""
        failed, _, step = os.environ.get("FIVEFOLD_RESUME_BEFORE", "").partition(":")
        self._before = float("inf")
        if failed and int(failed, 16) == int(run, 16):
            self._before = float(step)
            del os.environ["FIVEFOLD_RESUME_BEFORE"]
        self._names: dict[str, str] = {}

    def find(self, recovery: Recovery, failed: Mapping[str, str]) -> RecoveryChoice:
        """As `Recovery.find`."""
        while True:
            choice = recovery.find({**failed, **self._names})
            if choice.plan is None and self._names:
                self._before = float("inf")
                self._names.clear()
            elif choice.plan is None or choice.plan.manifest.step < self._before:
                return choice
            else:
                name = choice.plan.manifest.name
                self._names[name] = "the run was lost twice after it went on from there"


def _unflushed(loading: _Loading, plan: RecoveryPlan) -> Manifest | None:
    """The save, if the nodes that made it are here, have it, and nobody else does. Collective."""
    manifest, ranks, store = plan.manifest, loading.ranks, loading.persistent

    def look() -> dict[str, Any]:
        found = store.find(manifest.name) if ranks.rank == 0 else None
        there = found is not None and found.manifest is not None
        return {
            "there": there and not check(store.place, manifest.name, manifest.items(), deep=False)
        }

    if ranks.agree(f"looking for {manifest.name} in {store.place.where()}", look)[0]["there"]:
        return None
    hosts = tuple(member.host for member in manifest.members)
    return manifest if plan.complete and hosts == tuple(loading.node.members.hosts) else None


def _where(loading: _Loading, plan: RecoveryPlan) -> str:
    """Where most of a save was read: nodes have a directory of one name each."""
    name, node = plan.manifest.name, loading.node
    if set(plan.sources.values()) == {PERSISTENT}:
        return loading.persistent.place.where(name)
    return f"{node.store.place.where(name)} on {', '.join(node.members.hosts)}"


def _forgotten(loading: _Loading, choice: RecoveryChoice) -> list[Passed]:
    """The save that the run has noted, if it is newer than what was found: nothing else knows of it."""
    if choice.plan is None:
        return []

    def look() -> dict[str, Any]:
        first = loading.ranks.rank == 0
        read = partial(read_note, loading.persistent.place)
        return {"noted": noted(loading.opened.run, read) if first else ()}

    where = loading.persistent.place.where()
    epoch, step = loading.ranks.agree(f"reading {where}", look)[0]["noted"]
    found, name = choice.plan.manifest, generation_name(step, epoch)
    if (epoch, step) <= (found.epoch, found.step) or name in {p.name for p in choice.passed}:
        return []
    return [Passed(name, f"the run has noted it in {where}, and no manifest of it can be found")]


def _any_left(ranks: Ranks, node: RankNode, persistent: PersistentStore) -> bool:
    def look() -> dict[str, Any]:
        here = node.members.leads and bool(node.store.generations())
        far = ranks.rank == 0 and bool(persistent.generations())
        return {"any": here or far}

    return any(one["any"] for one in ranks.agree("looking for checkpoints", look))


def _again(loading: _Loading, completed: str, passed: Sequence[Passed]) -> None:
    """No save can be loaded: the run begins, if it never completed one, or if that was asked for.

    `completed` names a save that a node knows to have been completed. Raises `AllLost`.
    """
    opened, persistent = loading.opened, loading.persistent
    if not opened.known:
        return

    def look() -> dict[str, Any]:
        first = loading.ranks.rank == 0
        return {
            "last": last_save(opened.run, partial(read_note, persistent.place)) if first else ""
        }

    last = loading.ranks.agree(f"reading {persistent.place.where()}", look)[0]["last"] or completed
    if last and not loading.begin_again:
        raise _all_lost(loading, last, passed)
    why = f"none of its saves can be loaded (the last: {last})" if last else "it completed no save"
    loading.warn(
        f"{persistent.place.where()} is of a run that was started {opened.run.epoch} time(s), and {why}: it "
        "begins again at step 0"
    )


def _unreadable(persistent: PersistentStore, failed: Mapping[str, str]) -> Unrecoverable:
    """Some objects may hold a part of a save by now: a run must not begin like that."""
    reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
    return Unrecoverable(
        f"no save of the run in {persistent.place.where()} could be read: {reasons}. Start it again; if that "
        "does not help, remove what cannot be read with `fivefold checkpoint drop`"
    )


def _all_lost(loading: _Loading, last: str, passed: Sequence[Passed]) -> AllLost:
    node, where = loading.node, loading.persistent.place.where()
    reasons = "".join(f"; {one}" for one in passed)
    return AllLost(
        f"the run in {where} has made saves (the last: {last}), and none of them can be loaded. Looked at: "
        f"{where}; {node.store.root} on {', '.join(node.members.hosts)}{reasons}. Bring back the nodes or "
        "files that are missing; or begin at step 0 with begin_again=True (fivefold train: --begin-again), "
        "or in another directory"
    )


def _read(loading: _Loading, plan: RecoveryPlan) -> tuple[Request, dict[str, Any]]:
    """Read a save: tensors of the objects where they lie, and values."""
    ranks, state, manifest = loading.ranks, loading.state, plan.manifest
    with Pieces(loading.node, loading.persistent, plan) as pieces:
        held: list[Any] = []

        def look() -> dict[str, Any]:
            held.append(metadata_of(pieces.whole(manifest.metadata), manifest.name))
            saved = saved_in(held[0])
            return {"missing": state.missing(saved), "strange": state.strange(saved)}

        told = ranks.agree("reading metadata", look)
        strange = set.intersection(*(set(one["strange"]) for one in told))
        _check_names(manifest.name, {n for one in told for n in one["missing"]}, strange)
        wanted: list[Request] = []

        def ask() -> dict[str, Any]:
            wanted.append(state.request(saved_in(held[0]), ranks.size, manifest.world))
            return {}

        ranks.agree("comparing the state", ask)
        targets = dict(wanted[0].targets)
        dcp.load(targets, held[0], pieces, ranks.group)
    return wanted[0], targets


def _restore(loading: _Loading, request: Request, read: dict[str, Any]) -> None:
    """Hand the objects what was read."""

    def hand_out() -> dict[str, Any]:
        loading.state.restore(request, read)
        return {}

    loading.ranks.agree("restoring the state", hand_out)
    for note in request.notes:
        loading.warn(note)


def _check_names(name: str, missing: set[str], strange: set[str]) -> None:
    if missing or strange:
        parts = [
            f"{what} {', '.join(sorted(names)[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("it lacks", missing), ("it has", strange))
            if names
        ]
        raise UsageError(
            f"{name} was saved from other objects than these: {'; '.join(parts)}; build model and optimiser "
            "as they were, or save to another directory"
        )


# ---- Finding the save to go on from, over all nodes and levels, and getting at its files
#
# every node tells what it has ──► the newest save that is whole or can be rebuilt ──► its bytes are read
#      ▲                                                                                       │
#      └──────────────── a file is damaged: what is there now? ◄───────────────────────────────┘
# missing members are rebuilt ──► files are read here, from other nodes, or from the persistent level

_LOOK_S = 3600.0
"""how long a node may take to read what it has of one save"""


class Recovery:
    """The search for a save; all methods are collective. `node` has its agent."""

    def __init__(
        self, ranks: Ranks, node: RankNode, persistent: PersistentStore, run: RunHistory
    ) -> None:
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

    def begin(self, plan: RecoveryPlan) -> None:
        """Start what rebuilds. `CheckpointError` if that fails, which says nothing about the save."""
        if plan.tasks:
            self._node.start(self._ranks)

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
        self._node.start(self._ranks)
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
        self._room = memoryview(bytearray())
        """used again: fresh memory costs more than reading"""

    def read(self, name: str, start: int, length: int) -> memoryview:
        """Some bytes of a file, valid until the next are read. Raises `CheckpointError` or `OSError`."""
        place = self._plan.sources.get(name)
        if place is None:
            raise CheckpointError(f"{self._plan.manifest.name} has no file {name!r}")
        if len(self._room) < length:
            self._room = memoryview(bytearray(length))
        room = self._room[:length]
        if place in (self._node.members.me, PERSISTENT):
            filled = self._from_file(self._file(name, far=place == PERSISTENT), start, room)
        else:
            filled = self._from_peer(place, name, start, room)
        if filled != length:
            raise CheckpointError(f"{name} of {self._plan.manifest.name} ends too early")
        return room

    def whole(self, item: Item) -> bytes:
        """All bytes of a file."""
        return bytes(self.read(item.name, 0, item.length))

    @staticmethod
    def _from_file(file: Any, start: int, room: memoryview) -> int:
        file.seek(start)
        filled = 0
        # A file gives less than asked for only at its end, but nobody promises it.
        while filled < len(room) and (count := file.readinto(room[filled:])):
            filled += count
        return filled

    def _file(self, name: str, *, far: bool) -> BinaryIO:
        if name not in self._files:
            place = self._persistent.place if far else self._node.store.place
            self._files[name] = place.open(f"{self._plan.manifest.name}/{name}")
        return self._files[name]

    def _from_peer(self, node: int, name: str, start: int, room: memoryview) -> int:
        manifest = self._plan.manifest
        if node not in self._clients:
            self._clients[node] = PieceClient(
                self._node.addresses[node], self._node.key, timeout_s=self._node.timeout_s
            )
        for at in range(0, len(room), MOST_BYTES):
            part = room[at : at + MOST_BYTES]
            wanted = Stretch(manifest.name, manifest.save, "file", 0, name, start + at, len(part))
            if len(self._clients[node].read(wanted, part)) < len(part):
                return at
        return len(room)

    def close(self) -> None:
        """Hang up, and close files."""
        for file in self._files.values():
            file.close()
        for client in self._clients.values():
            client.close()
        self._files, self._clients = {}, {}
