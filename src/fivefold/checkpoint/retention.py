"""Which copies in the persistent directory may go: old ones of this run, once newer ones are there."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.run import Run
from fivefold.checkpoint.store import Generation, Store, check

__all__ = ["retain"]


def retain(
    store: Store,
    newest: Manifest,
    count: int,
    run: Run,
    allowed: Callable[[], None] = lambda: None,
) -> list[Generation]:
    """Remove copies that are older than the newest `count`, and return them. `newest` was just flushed.

    Only what the run holds by its record, and has all files in their lengths, counts; while fewer than
    `count` do, nothing is removed. Nothing is ever removed that another run wrote, that has no manifest, or
    whose manifest cannot be read.

    Args:
        store: the persistent one.
        newest: nothing is removed unless this very save is there.
        count: how many stay; 0: all.
        run: the record, with the present start.
        allowed: called before every removal; raises where this job must not write there any more.

    Raises:
        OSError: the directory cannot be read or written.
    """
    if not count:
        return []
    ours = [
        generation
        for generation in reversed(store.generations())
        if (held := generation.manifest) is not None and held.run == run.run and held.me is None
    ]
    kept: list[Generation] = []
    for generation in ours:
        if len(kept) < count and run.holds(generation.step, generation.epoch):
            assert generation.manifest is not None
            if not check(store.place, generation.name, generation.manifest.items(), deep=False):
                kept.append(generation)
    there = [g for g in kept if g.manifest is not None and g.manifest.same_save(newest)]
    if len(kept) < count or not there:
        return []
    surplus = [g for g in reversed(ours) if g.order < kept[-1].order]
    for generation in surplus:
        allowed()
        store.drop(generation)
    return surplus
