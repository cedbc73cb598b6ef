"""From the first save of a start to its last: the claim on the directory, the agents, and the threads."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fivefold.checkpoint.events import tell_flushed
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.note import Note, SavingCosts, write_note
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.rhythm import Rhythm
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.saving import Saved, Saver, Stamp
from fivefold.checkpoint.settings import Settings
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state import Captured
from fivefold.checkpoint.store import Generation, Store, check
from fivefold.closing import Closing
from fivefold.errors import CheckpointError
from fivefold.launch.progress import own_progress
from fivefold.trace.current import usage

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
        node: of this rank; its agent is started with the first save.
        opened: the run, in the directory that all nodes see; it is claimed.
        settings: what was decided.
        staging: where states are copied.
        stamp: what manifests say.
        rhythm: is told what copies cost.
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
        self._latest: Manifest | None = None
        """that was saved, protected or not"""
        self._flushed_last: Manifest | None = None
        node.at_end = settings.directory, stamp.epoch
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
        last, problem = self._settled or self._latest, None
        if last is not None and last is not self._flushed_last:
            try:
                self._node.start(self._channels.training)  # none was, where nothing was saved
                self._flush(last)
            except CheckpointError as caught:
                problem = caught
        self._flusher.close()
        self._opened.close()
        if problem is not None:
            assert last is not None
            raise CheckpointError(f"step {last.step} was not flushed: {described(problem)}")

    def abandon(self) -> None:
        """After an error: what ends in a moment may end, the rest is left.

        An interpreter that ends while a thread is within a collective aborts the process: the exit code,
        which tells what went wrong, would be lost.
        """
        end = time.monotonic() + _ABANDON_S
        self._saver.abandon(end)
        self._flusher.abandon(end)

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
        self._latest = manifest
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

    def _flushed(self, manifest: Manifest, copied: Copied, took_s: float) -> None:
        self._rhythm.flushed(copied.cpu_s)
        own_progress().copied(took_s - copied.waited_s)
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
    run: RunHistory,
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


# ---- Copies to the persistent level, one after the other, in a thread beside saves and training
#
# agents of all nodes copy ── all have ──► manifest.json, by the first node ──► FLUSHED on every node

_ABANDON_S = 3.0
"""how long an error waits for saves under way"""
_QUIET_S = 2.0
"""an end of a run that waits no longer needs no word"""
_AGAIN_S = 60.0


class Flusher(Closing):
    """Flushes of one rank; all ranks ask for the same, in the same order. Its thread alone uses `ranks`.

    Args:
        ranks: over a group of its own.
        node: of this rank.
        url: the persistent level.
        bytes_per_s: limit of each node; None: no limit.
        patience_s: how long a copy may stand still while the run waits for it to end.
        allowed: raises where this job may not write there any more; called on the first rank.
        flushed: called on the first rank with a save that was flushed, what its node's agent did for it, and
            the seconds from beginning to end.
    """

    def __init__(
        self,
        ranks: Ranks,
        node: RankNode,
        url: str,
        *,
        bytes_per_s: float | None,
        patience_s: float,
        allowed: Callable[[], None],
        flushed: Callable[[Manifest, Copied, float], None],
    ) -> None:
        self._ranks, self._node, self._url = ranks, node, url
        self._bytes_per_s, self._patience_s = bytes_per_s, patience_s
        self._allowed, self._flushed = allowed, flushed
        self._jobs: queue.SimpleQueue[tuple[Manifest, Future[str]] | None] = queue.SimpleQueue()
        self.busy: set[str] = set()
        """generations that are still needed"""
        self._current = ""
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="fivefold-flushes", daemon=True)
        self._thread.start()

    def start(self, manifest: Manifest) -> Future[str]:
        """Flush a generation; the future gives what went wrong, or nothing."""
        done: Future[str] = Future()
        self.busy.add(manifest.name)
        self._jobs.put((manifest, done))
        return done

    def close(self) -> None:
        """End when all has been flushed that was begun, now without limit, or does not get on any more.

        What takes longer than a moment is told on standard error.
        """
        if not self._thread.is_alive():
            return
        self._ending = True
        self._node.hurry()
        self._jobs.put(None)
        self._thread.join(_QUIET_S)
        while self._thread.is_alive():
            if self._ranks.rank == 0:
                self._say()
            self._thread.join(_AGAIN_S)

    def abandon(self, end: float) -> None:
        """Let the thread end with what it does, but not wait for it longer than until `end` (monotonic)."""
        self._jobs.put(None)
        self._thread.join(max(0.0, end - time.monotonic()))

    def _say(self) -> None:
        figures = self._node.figures()
        copied = (
            f"; its node has read {figures.flush_bytes >> 20} MiB for copies" if figures else ""
        )
        sys.stderr.write(
            f"fivefold: training has ended, and {self._current or 'the last save'} is copied to "
            f"{self._url}{copied}. Until then it is on the nodes alone\n"
        )
        sys.stderr.flush()

    def _work(self) -> None:
        usage.background = True
        while (job := self._jobs.get()) is not None:
            manifest, done = job
            problem, self._current = "", f"step {manifest.step}"
            begun = time.perf_counter()
            try:
                self._flush(manifest)
                tell_flushed(manifest.step, time.perf_counter() - begun)
            except Exception as failed:  # noqa: BLE001 - told to whoever waits
                problem = (
                    f"step {manifest.step} was not flushed to {self._url}: {described(failed)}"
                )
            self.busy.discard(manifest.name)
            done.set_result(problem)

    def _flush(self, manifest: Manifest) -> None:
        leads, first = self._node.members.leads, self._ranks.rank == 0
        begun = time.monotonic()
        limit = None if self._ending else self._bytes_per_s

        def copy() -> Future[Copied] | None:
            if first:
                self._allowed()
            return self._node.flush(manifest.name, self._url, limit)

        def finish() -> Future[None] | None:
            if first:
                self._allowed()
            return self._node.agent.finish_flush(manifest.name, self._url) if first else None

        def advance() -> Mapping[str, Any]:
            if leads:
                store = self._node.store
                found = store.find(manifest.name)
                if found is None or found.manifest is None:
                    raise CheckpointError(f"{manifest.name} is gone from this node")
                store.advance(
                    Generation(store.place, manifest.step, manifest.epoch, manifest), "flushed"
                )
            return {}

        tired = _Patience(self._node, self._patience_s, lambda: self._ending)
        copied = self._ranks.agree_later(f"copying step {manifest.step}", copy, tired)
        self._ranks.agree_later(f"completing the copy of step {manifest.step}", finish, tired)
        self._ranks.agree(f"noting the copy of step {manifest.step}", advance)
        if first and copied is not None:
            self._flushed(manifest, copied, time.monotonic() - begun)


class _Patience:
    """Tells why not to wait for a copy any longer: the run is to end, and the copy stands still."""

    def __init__(self, node: RankNode, limit_s: float, ending: Callable[[], bool]) -> None:
        self._node, self._limit_s, self._ending = node, limit_s, ending
        self._seen = -1
        self._since = time.monotonic()

    def __call__(self) -> str:
        figures = self._node.figures() if self._ending() else None
        moved = -1 if figures is None else figures.flush_bytes
        if moved != self._seen or not self._ending():
            self._seen, self._since = moved, time.monotonic()
        if time.monotonic() - self._since < self._limit_s:
            return ""
        return (
            f"the run is to end, and nothing was copied for {self._limit_s:g} s. The save is on the nodes: "
            "`fivefold checkpoint flush` copies it"
        )
