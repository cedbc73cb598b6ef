"""Which generation a run goes on from, and what has to be rebuilt for it: planning alone, no files.

inventories of all nodes and of the persistent level
  -> all saves, newest first                             `candidates`
  -> is it on the line that the run took?                `Run.holds`; if not, it is stale
  -> is every file somewhere, or can be rebuilt?         `plan`
The first that passes is chosen; of every newer one it is said why not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fivefold.checkpoint.inventory import PERSISTENT, Holding, Inventory
from fivefold.checkpoint.manifest import Manifest, Member, parse_generation_name, redundancy_name
from fivefold.checkpoint.schemes import scheme_named
from fivefold.checkpoint.store import UNENDED
from fivefold.errors import Unrecoverable

__all__ = [
    "Passed",
    "RebuildTask",
    "RecoveryChoice",
    "RecoveryPlan",
    "candidates",
    "choose",
    "plan",
]


@dataclass(frozen=True)
class RebuildTask:
    """Make the files of a member whole on a node: the arguments of `encoding.rebuild`.

    Where no payload is lost, only the manifest is, and the node cannot serve its files without.
    """

    member: int
    node: int
    lost: tuple[int, ...]
    """members whose data cannot be read"""
    bare: tuple[int, ...]
    """members whose redundancy cannot be read"""


@dataclass(frozen=True)
class RecoveryPlan:
    """How to get at every file of a save."""

    manifest: Manifest
    sources: Mapping[str, int]
    """by name of a file, payload and metadata: the node, or `PERSISTENT`, that has it when tasks are done"""
    homes: Mapping[int, int]
    """by member: the node that serves its data or redundancy while members are rebuilt"""
    tasks: tuple[RebuildTask, ...] = ()
    bare: Mapping[int, int] = field(default_factory=dict[int, int])
    """by member without redundancy: the node that can make it again when the tasks are done (`protect`)"""

    @property
    def complete(self) -> bool:
        """Nothing has to be rebuilt."""
        return not self.tasks


@dataclass(frozen=True)
class Passed:
    """A save that is newer than the chosen one, and why the run cannot go on from it."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class RecoveryChoice:
    """The newest save that can be loaded, and the newer ones that cannot."""

    plan: RecoveryPlan | None
    """None: there is none"""
    passed: tuple[Passed, ...]


def choose(
    inventories: Sequence[Inventory],
    *,
    holds: Callable[[int, int], bool] = lambda step, epoch: True,  # noqa: ARG005
    failed: Mapping[str, str] | None = None,
) -> RecoveryChoice:
    """The newest save of the run that is complete or can be rebuilt over all levels together.

    Args:
        inventories: of every node of the present run, those that have nothing included, and of the
            persistent level.
        holds: whether the generation (step, epoch) is on the line that the run took (`Run.holds`): what a
            node brings back from an earlier start never wins.
        failed: names of generations that were tried already, and what happened.
    """
    manifests = [h.manifest for inventory in inventories for h in inventory.holdings]
    passed: list[Passed] = []
    for manifest in candidates(manifests):
        why = (failed or {}).get(manifest.name, "")
        if not why and not holds(manifest.step, manifest.epoch):
            why = "a later start of the run went on from before it; it is left alone"
        if not why:
            try:
                chosen = plan(manifest, inventories)
                unread = _unread(inventories, holds, (manifest.epoch, manifest.step))
                return RecoveryChoice(chosen, (*unread, *passed))
            except Unrecoverable as problem:
                why = str(problem)
        passed.append(Passed(manifest.name, why))
    return RecoveryChoice(None, (*_unread(inventories, holds, (-1, -1)), *passed))


def _unread(
    inventories: Sequence[Inventory], holds: Callable[[int, int], bool], after: tuple[int, int]
) -> Iterator[Passed]:
    """Saves after (epoch, step) whose manifests are damaged everywhere: their files cannot be told."""
    known = {holding.manifest.name for one in inventories for holding in one.holdings}
    told = {
        n: why for one in inventories for n, why in (one.broken or {}).items() if why != UNENDED
    }
    for name in sorted(told.keys() - known, reverse=True):
        step, epoch = parse_generation_name(name) or (0, 0)
        if (epoch, step) > after and holds(step, epoch):
            yield Passed(name, told[name])


def candidates(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Each save once, newest first: a later start of the run counts more than a later step."""
    saves = {(m.epoch, m.step, m.save): m for m in manifests}
    return [
        replace(saves[order], me=None, redundancy=(), state="local")
        for order in sorted(saves, reverse=True)
    ]


def plan(manifest: Manifest, inventories: Iterable[Inventory]) -> RecoveryPlan:
    """How to load one save. Raises `Unrecoverable` with what is lost."""
    places = _Places(manifest, inventories)
    sources: dict[str, int] = {}
    for item in (manifest.metadata, *(i for m in manifest.members for i in m.items)):
        if (node := places.of(item.name)) is not None:
            sources[item.name] = node
    if manifest.metadata.name not in sources:
        raise Unrecoverable(f"no node has its {manifest.metadata.name} undamaged")
    lost = [m for m in manifest.members if any(i.name not in sources for i in m.items)]
    tasks = places.to_rebuild(set(sources.values()))
    for member in lost:
        task = _task(places, member, [t.node for t in tasks if t.lost])
        tasks.append(task)
        sources |= {item.name: task.node for item in member.items}
    owners = places.owners | {t.member: t.node for t in tasks if t.node in places.unowned()}
    single = scheme_named(manifest.scheme).least == 1
    bare = {} if single else {m: owners[m] for m in sorted(places.bare) if m in owners}
    return RecoveryPlan(manifest, sources, places.homes, tuple(tasks), bare)


class _Places:
    """Who has what of one save."""

    def __init__(self, manifest: Manifest, inventories: Iterable[Inventory]) -> None:
        self.manifest = manifest
        self.nodes: list[int] = []
        self._held: dict[int, Holding] = {}
        # The nodes' own storage before the persistent level, which is slower.
        for inventory in sorted(inventories, key=lambda i: (i.node == PERSISTENT, i.node)):
            if inventory.node != PERSISTENT:
                self.nodes.append(inventory.node)
            for holding in inventory.holdings:
                if holding.manifest.same_save(manifest):
                    self._held[inventory.node] = holding
        self.owners = {
            holding.owner: node
            for node, holding in self._held.items()
            if holding.owner is not None and node != PERSISTENT
        }
        """by member: the node whose storage is its own"""
        self._data = {m.number: self._with_all(m) for m in manifest.members}
        self.homes: dict[int, int] = {}
        self.bare: set[int] = set()
        for number, node in self._data.items():
            self._find_redundancy(number, node)

    @property
    def lost(self) -> set[int]:
        """Members whose data no single node can give."""
        return {number for number, node in self._data.items() if node is None}

    def of(self, name: str) -> int | None:
        """Who has a file: the member whose it is, if possible."""
        return next(iter(self._having([name], None)), None)

    def to_rebuild(self, needed: Collection[int]) -> list[RebuildTask]:
        """For nodes whose files are needed while their manifest cannot be read."""
        return [
            RebuildTask(owner, node, (), ())
            for owner, node in sorted(self.owners.items())
            if not self._held[node].readable and (node in needed or node in self.homes.values())
        ]

    def unowned(self) -> list[int]:
        """Nodes that came without storage of this save."""
        taken = set(self.owners.values())
        return [node for node in self.nodes if node not in taken]

    def _with_all(self, member: Member) -> int | None:
        names = [item.name for item in member.items]
        nodes = [n for n in self._having(names, member.number) if n != PERSISTENT]
        return nodes[0] if nodes else None

    def _find_redundancy(self, number: int, node: int | None) -> None:
        """One node answers for a member: where its data is, else where its redundancy is."""
        having = [n for n in self._having([redundancy_name(number)], number) if n != PERSISTENT]
        home = node if node is not None else next(iter(having), None)
        if home is not None:
            self.homes[number] = home
        if home not in having:
            self.bare.add(number)

    def _having(self, names: Collection[str], member: int | None) -> list[int]:
        """Nodes with all these files: the member's own first, the persistent level last."""
        nodes = [node for node, holding in self._held.items() if holding.good.issuperset(names)]
        own = self.owners.get(member) if member is not None else None
        return sorted(nodes, key=lambda node: node != own)


def _task(places: _Places, member: Member, busy: Sequence[int]) -> RebuildTask:
    manifest = places.manifest
    group = manifest.set_of(member.number)
    lost = [number for number in group if number in places.lost]
    bare = [number for number in group if number in places.bare]
    try:
        scheme_named(manifest.scheme).rebuild(
            [manifest.members[number].length for number in group],
            [group.index(number) for number in lost],
            group.index(member.number),
            [group.index(number) for number in bare],
        )
    except Unrecoverable:
        raise Unrecoverable(_too_much(manifest, group, lost, bare)) from None
    return RebuildTask(member.number, _host(places, member.number, busy), tuple(lost), tuple(bare))


def _host(places: _Places, member: int, busy: Sequence[int]) -> int:
    """Where to rebuild a member: on its own node, on a node that is new, or where least is rebuilt."""
    own = places.owners.get(member)
    if own is not None:
        return own
    if not places.nodes:
        raise Unrecoverable("its files have to be rebuilt, and no node takes part")
    new = [node for node in places.unowned() if node not in busy]
    return new[0] if new else min(places.nodes, key=lambda node: (list(busy).count(node), node))


def _too_much(
    manifest: Manifest, group: Sequence[int], lost: Sequence[int], bare: Sequence[int]
) -> str:
    def named(numbers: Sequence[int]) -> str:
        return ", ".join(f"{number} ({manifest.members[number].host})" for number in numbers)

    scheme = manifest.scheme
    without = [number for number in bare if number not in lost]
    also = f"; redundancy is missing at {named(without)}" if without and scheme != "single" else ""
    return (
        f"of the set {named(group)} the data of {named(lost)} is lost or damaged{also}: "
        f"scheme {scheme} cannot rebuild it"
    )
