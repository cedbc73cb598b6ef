"""Copies to the persistent level, one after the other, in a thread beside saves and training.

agents of all nodes copy ── all have ──► manifest.json, by the first node ──► FLUSHED on every node
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.node import Node
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.store import Generation
from fivefold.closing import Closing
from fivefold.errors import CheckpointError

__all__ = ["Flusher"]


class Flusher(Closing):
    """Flushes of one rank; all ranks ask for the same, in the same order. Its thread alone uses `ranks`.

    Args:
        ranks: over a group of its own.
        node: of this rank.
        url: the persistent level.
        bytes_per_s: limit of each node; None: no limit.
        allowed: raises where this job may not write there any more; called on the first rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        node: Node,
        url: str,
        *,
        bytes_per_s: float | None,
        allowed: Callable[[], None],
    ) -> None:
        self._ranks, self._node, self._url = ranks, node, url
        self._bytes_per_s, self._allowed = bytes_per_s, allowed
        self._jobs: queue.SimpleQueue[tuple[Manifest, bool, Future[str]] | None] = (
            queue.SimpleQueue()
        )
        self.busy: set[str] = set()
        """generations that are still needed"""
        self._thread = threading.Thread(target=self._work, name="fivefold-flushes", daemon=True)
        self._thread.start()

    def start(self, manifest: Manifest, *, hurry: bool = False) -> Future[str]:
        """Flush a generation; the future gives what went wrong, or nothing. In a hurry no limit holds."""
        done: Future[str] = Future()
        self.busy.add(manifest.name)
        self._jobs.put((manifest, hurry, done))
        return done

    def close(self) -> None:
        """End when all has been flushed that was begun."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            manifest, hurry, done = job
            problem = ""
            try:
                self._flush(manifest, None if hurry else self._bytes_per_s)
            except Exception as failed:  # noqa: BLE001 - told to whoever waits
                problem = (
                    f"step {manifest.step} was not flushed to {self._url}: {failed or repr(failed)}"
                )
            self.busy.discard(manifest.name)
            done.set_result(problem)

    def _flush(self, manifest: Manifest, bytes_per_s: float | None) -> None:
        leads, first = self._node.members.leads, self._ranks.rank == 0

        def copy() -> Future[Copied] | None:
            if first:
                self._allowed()
            return self._node.flush(manifest.name, self._url, bytes_per_s)

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

        self._ranks.agree_later(f"copying step {manifest.step}", copy)
        self._ranks.agree_later(f"completing the copy of step {manifest.step}", finish)
        self._ranks.agree(f"noting the copy of step {manifest.step}", advance)
