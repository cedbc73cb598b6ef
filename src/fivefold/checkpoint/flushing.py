"""Copies to the persistent level, one after the other, in a thread beside saves and training.

agents of all nodes copy ── all have ──► manifest.json, by the first node ──► FLUSHED on every node
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from fivefold.checkpoint.events import tell_flushed
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.store import Generation
from fivefold.closing import Closing
from fivefold.errors import CheckpointError
from fivefold.trace.current import usage

__all__ = ["Flusher"]

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
        flushed: called on the first rank with a save that was flushed, and the seconds of processor time that
            its node's agent took for it.
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
        flushed: Callable[[Manifest, float], None],
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
        if first:
            self._flushed(manifest, 0.0 if copied is None else copied.cpu_s)


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
