"""From the first save of a start to its last: the claim on the directory, the agents, and the threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from fivefold.checkpoint.flushing import Flusher
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.note import Note, SavingCosts, write_note
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.rhythm import Rhythm
from fivefold.checkpoint.run import Run
from fivefold.checkpoint.saving import Saved, Saver, Stamp
from fivefold.checkpoint.settings import Settings
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state import Captured
from fivefold.checkpoint.store import Generation, Store, check
from fivefold.closing import Closing
from fivefold.errors import CheckpointError

__all__ = ["Channels", "Writing", "retain"]


@dataclass(frozen=True)
class Channels:
    """The ranks, over a group for each thread that talks to them."""

    training: Ranks
    saves: Ranks
    flushes: Ranks


class Writing(Closing):
    """All saves of one start of a run. Making it and closing it is collective.

    Args:
        channels: to the other ranks.
        node: of this rank; its agent is started.
        opened: the run, in the directory that all nodes see; it is claimed.
        settings: what was decided.
        staging: where states are copied.
        stamp: what manifests say.
        rhythm: is told what copies cost.

    Raises:
        CheckpointError: the agents do not start.
    """

    def __init__(
        self,
        channels: Channels,
        node: RankNode,
        *,
        opened: Opened,
        settings: Settings,
        staging: Staging,
        stamp: Stamp,
        rhythm: Rhythm,
    ) -> None:
        self._channels, self._node, self._persistent = channels, node, opened.store
        self._opened, self._settings, self._rhythm = opened, settings, rhythm
        self._lock = threading.Lock()
        self._flushes: list[Future[str]] = []
        self._failed: list[str] = []
        """what went wrong besides"""
        self._count = 0
        """saves that were protected"""
        self._settled: Manifest | None = None
        self._flushed_last: Manifest | None = None
        node.start(channels.training, settings.local)
        self._flusher = Flusher(
            channels.flushes,
            node,
            settings.directory,
            bytes_per_s=settings.plan.flush_bytes_per_s or None,
            patience_s=settings.timeout_s,
            allowed=opened.check,
            flushed=self._flushed,
        )
        self._saver = Saver(channels.saves, node, staging, stamp, self)

    def start(self, step: int, captured: Captured | Exception) -> Future[Saved]:
        """Begin a save; see `Saver.start`."""
        return self._saver.start(step, captured)

    def adopt(self, manifest: Manifest) -> None:
        """Before the first save: copy this one of an earlier start at the end, unless a later one is."""
        self._settled = manifest

    def problems(self) -> Iterator[str]:
        """What went wrong with copies that have ended, and in the persistent directory; each is told once."""
        with self._lock:
            failed, self._failed = self._failed, []
            ended = [flush for flush in self._flushes if flush.done()]
            self._flushes = [flush for flush in self._flushes if not flush.done()]
        yield from failed
        for flush in ended:
            if problem := flush.result():
                yield problem

    def wait(self) -> None:
        """Return when all copies that were begun have ended."""
        with self._lock:
            under_way = list(self._flushes)
        for flush in under_way:
            flush.result()

    def close(self) -> None:
        """End when all is written, protected and copied that was begun, and the last save copied as well.

        First what is under way becomes safe on the nodes; then it is copied. See `Flusher.close`.
        """
        self._saver.close()
        if self._settled is not None and self._settled is not self._flushed_last:
            self._flush(self._settled)
        self._flusher.close()
        self._opened.close()

    # ---- called in the thread of saves

    def first(self) -> None:
        """Enter this start into the record of the run."""
        self._opened.record(self._settings.local)

    def protected(self, manifest: Manifest) -> None:
        """Flush what is due, and drop what is not needed any more."""
        self._settled = manifest
        self._count += 1
        every = self._settings.plan.flush_every
        if every and self._count % every == 0:
            self._flush(manifest)
        if self._node.members.leads:
            run = self._opened.started
            self._node.store.keep(self._settings.plan.keep, run=run, busy=self._flusher.busy)

    def _flush(self, manifest: Manifest) -> None:
        self._flushed_last = manifest
        flush = self._flusher.start(manifest)
        with self._lock:
            self._flushes.append(flush)

    def saved(self, manifest: Manifest) -> None:
        """On the first rank, tell in the persistent directory what was saved, and at what costs."""
        if self._channels.saves.rank != 0:
            return
        rhythm, plan = self._rhythm, self._settings.plan
        costs = SavingCosts(
            save_s=rhythm.cost_s if rhythm.known else 0.0,
            flush_s=rhythm.flush_s,
            every_s=0.0 if plan.every_steps else rhythm.interval_s,
            mtbf_s=plan.mtbf_s,
            flush_every=plan.flush_every,
        )
        hosts = tuple(member.host for member in manifest.members)
        note = Note(manifest.run, manifest.epoch, manifest.step, hosts, manifest.scheme, costs)
        try:
            self._opened.check()
            write_note(self._persistent.place, note)
        except (CheckpointError, OSError) as problem:
            where = self._persistent.place.where()
            self._tell(
                f"step {manifest.step} is saved, but {where} does not know of it: {described(problem)}"
            )

    # ---- called in the thread of flushes, on the first rank

    def _flushed(self, manifest: Manifest, cpu_s: float) -> None:
        self._rhythm.flushed(cpu_s)
        run = self._opened.started
        count = self._settings.plan.keep_flushed
        try:
            retain(self._persistent, manifest, count, run, self._opened.check)
        except (CheckpointError, OSError) as problem:
            where = self._persistent.place.where()
            self._tell(f"old copies in {where} were not removed: {described(problem)}")

    def _tell(self, problem: str) -> None:
        with self._lock:
            self._failed.append(problem)


# ---- Which copies in the persistent directory may go: old ones of this run, once newer ones are there


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
