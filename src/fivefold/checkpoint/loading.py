"""Giving every object of a run the state of the newest save that can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.checkpoint import dcp
from fivefold.checkpoint.files import crash_at
from fivefold.checkpoint.metadata import metadata_of
from fivefold.checkpoint.node import Node
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.recovering import Pieces, Recovery
from fivefold.checkpoint.recovery import Choice, Plan
from fivefold.checkpoint.state import Request, State, saved_in
from fivefold.checkpoint.store import PersistentStore
from fivefold.errors import CheckpointError, Unrecoverable, UsageError

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """From where a run goes on."""

    step: int
    epoch: int
    rebuilt: int
    """members whose files had to be made anew"""


@dataclass(frozen=True)
class _Loading:
    """What the functions below share."""

    ranks: Ranks
    node: Node
    persistent: PersistentStore
    state: State
    warn: Callable[[str], None]


def load(
    ranks: Ranks,
    node: Node,
    persistent: PersistentStore,
    *,
    opened: Opened,
    state: State,
    local: Path,
    warn: Callable[[str], None],
) -> Loaded | None:
    """Find the newest save, rebuild what is lost of it, and read it. None if there is none. Collective.

    Raises:
        Unrecoverable: there are saves, and none can be loaded.
        UsageError: the save is of another model, or of a number of ranks that will not do.
    """
    if not _any_left(ranks, node, persistent):
        return _again(persistent, opened, warn)
    node.start(ranks, local)
    crash_at("restarting")
    recovery = Recovery(ranks, node, persistent, opened.run)
    failed: dict[str, str] = {}
    told: set[str] = set()
    loading = _Loading(ranks, node, persistent, state, warn)
    while True:
        choice = recovery.find(failed)
        for passed in choice.passed:
            if passed.name not in told:
                told.add(passed.name)
                warn(f"a newer save is passed over: {passed}")
        if choice.plan is None and not choice.passed:
            return _again(persistent, opened, warn)
        if choice.plan is None:
            raise _nothing(persistent, choice)
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
        return Loaded(manifest.step, manifest.epoch, rebuilt)


def _any_left(ranks: Ranks, node: Node, persistent: PersistentStore) -> bool:
    def look() -> dict[str, Any]:
        here = node.members.leads and bool(node.store.generations())
        far = ranks.rank == 0 and bool(persistent.generations())
        return {"any": here or far}

    return any(one["any"] for one in ranks.agree("looking for checkpoints", look))


def _again(persistent: PersistentStore, opened: Opened, warn: Callable[[str], None]) -> None:
    """No save was ever completed, or none is left of any: the run begins."""
    if opened.known:
        warn(
            f"{persistent.place.where()} is of a run that was started {opened.run.epoch} time(s), but no "
            "complete save of it is left: it begins again"
        )


def _nothing(persistent: PersistentStore, choice: Choice) -> Unrecoverable:
    reasons = "; ".join(map(str, choice.passed))
    return Unrecoverable(
        f"none of the saves of the run in {persistent.place.where()} can be loaded: {reasons}. Bring back "
        "the nodes that have the missing files, or begin a new run in another directory"
    )


def _read(loading: _Loading, plan: Plan) -> tuple[Request, dict[str, Any]]:
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
