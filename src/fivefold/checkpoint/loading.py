"""Giving every object of a run the state of the newest save that can be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.checkpoint import dcp
from fivefold.checkpoint.files import crash_at
from fivefold.checkpoint.inventory import PERSISTENT
from fivefold.checkpoint.manifest import Manifest, generation_name
from fivefold.checkpoint.metadata import metadata_of
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.note import last_save, noted, read_note
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.recovery import Pieces, Recovery
from fivefold.checkpoint.recovery_plan import Passed, RecoveryChoice, RecoveryPlan
from fivefold.checkpoint.state import Request, State, saved_in
from fivefold.checkpoint.store import PersistentStore, check
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
    local: Path,
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
    persistent = opened.store
    if not _any_left(ranks, node, persistent):
        return _again(loading, "", ())
    node.start(ranks, local)
    crash_at("restarting")
    recovery = Recovery(ranks, node, persistent, opened.run)
    failed: dict[str, str] = {}
    told: set[str] = set()
    while True:
        choice = recovery.find(failed)
        for passed in (*_forgotten(loading, choice), *choice.passed):
            if passed.name not in told:
                told.add(passed.name)
                warn(f"a newer save is passed over: {passed}")
        if choice.plan is None and failed:
            raise _unreadable(persistent, failed)
        if choice.plan is None:
            return _again(loading, recovery.completed, choice.passed)
        manifest = choice.plan.manifest
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
