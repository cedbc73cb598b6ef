"""One save after the other, in a thread beside training.

    staging.copy ── all ranks alike? ── DCP writes ── .metadata, manifest ──► LOCAL      on every node
                                                      agents encode      ──► PROTECTED  agreed by all nodes
                                                      agents copy        ──► FLUSHED    every n-th

Every rank makes the same calls to the others in the same order, whatever fails on one of them: what fails is
told to all, and that save alone is given up.
"""

from __future__ import annotations

import contextlib
import pickle
import platform
import queue
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import xxhash

from fivefold.checkpoint import dcp
from fivefold.checkpoint.agent_client import Protection
from fivefold.checkpoint.events import tell_saved
from fivefold.checkpoint.files import crash_at
from fivefold.checkpoint.manifest import METADATA, Item, Manifest, Member
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state import Captured
from fivefold.checkpoint.store import Generation
from fivefold.checkpoint.values import fingerprint
from fivefold.closing import Closing
from fivefold.errors import CheckpointError, UsageError
from fivefold.trace.current import usage

__all__ = ["GOES_ON", "Saved", "Saver", "Stamp"]

GOES_ON = ", and training goes on"
"""said of a save that failed, unless the run ends with it"""


@dataclass(frozen=True)
class Stamp:
    """What the manifests of all saves of a start say."""

    run: str
    epoch: int
    layout: Mapping[str, int]
    scheme: str
    sets: tuple[tuple[int, ...], ...]


class SaveObserver(Protocol):
    """What becomes of saves; called in the saver's thread."""

    def first(self) -> None:
        """On the first rank, before the first save: the record of the run is written."""

    def saved(self, manifest: Manifest) -> None:
        """On every rank: a save is there, protected or not."""

    def protected(self, manifest: Manifest) -> None:
        """On every rank: a save is protected."""


@dataclass(frozen=True)
class Saved:
    """How a save went on this rank."""

    step: int
    bytes: int
    """staged by this rank"""
    copied_s: float
    written_s: float
    protected_s: float
    cpu_s: float
    """processor time of this process for all of it"""
    agent_cpu_s: float = 0.0
    """of this node's agent since the save before, copies to the persistent level apart; on its first rank"""
    problem: str = ""
    """why the save is not protected, or not even there"""
    manifest: Manifest | None = None
    """None: there is no such checkpoint"""


@dataclass
class _Job:
    """One save under way."""

    step: int
    captured: Captured | Exception
    """what to save, or why this rank cannot"""
    done: Future[Saved]
    times: list[float] = field(default_factory=list[float])
    cpu_s: float = 0.0
    """of the thread, when the save began"""

    def mark(self) -> None:
        self.times.append(time.perf_counter())

    def lasted(self, index: int) -> float:
        times = self.times
        return times[index + 1] - times[index] if index + 1 < len(times) else 0.0


class Saver(Closing):
    """Makes the saves of one rank. Its thread alone uses `ranks`."""

    def __init__(
        self, ranks: Ranks, node: RankNode, staging: Staging, stamp: Stamp, observer: SaveObserver
    ) -> None:
        self._ranks, self._node = ranks, node
        self._members, self._store = node.members, node.store
        self._staging, self._stamp, self._observer = staging, stamp, observer
        self._planner = dcp.Planner()
        self._begun = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="fivefold-saves", daemon=True)
        self._thread.start()

    def start(self, step: int, captured: Captured | Exception) -> Future[Saved]:
        """Begin a save of what `Staging.begin` returned, or tell the others why there is none here.

        The future never raises.
        """
        job = _Job(step, captured, Future())
        self._jobs.put(job)
        return job.done

    def close(self) -> None:
        """End when all saves that were begun have ended."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            self._planner.forget()

    def abandon(self, end: float) -> None:
        """Let the thread end with what it does, but not wait for it longer than until `end` (monotonic)."""
        self._jobs.put(None)
        self._thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        usage.background = True
        while (job := self._jobs.get()) is not None:
            job.mark()
            job.cpu_s = time.thread_time()
            try:
                saved = self._save(job)
            except Exception as problem:  # noqa: BLE001 - a failing save must not stop the run
                saved = self._told(job, _not_saved(job.step, problem), None)
                self._clear(job.step)
            if not saved.problem:
                local_s = saved.copied_s + saved.written_s
                tell_saved(saved.step, saved.bytes, local_s=local_s, protected_s=saved.protected_s)
            job.done.set_result(saved)
            del job

    def _told(self, job: _Job, problem: str, manifest: Manifest | None) -> Saved:
        return Saved(
            job.step,
            self._staging.bytes,
            copied_s=job.lasted(0),
            written_s=job.lasted(1),
            protected_s=job.lasted(2),
            cpu_s=time.thread_time() - job.cpu_s,
            problem=problem,
            manifest=manifest,
        )

    def _save(self, job: _Job) -> Saved:
        captured, differ = self._copied(job)
        job.mark()
        items, metadata = self._written(job, captured, differ)
        generation = self._committed(job.step, items, metadata)
        job.mark()
        problem = self._protected(generation)
        assert generation.manifest is not None
        self._observer.saved(generation.manifest)
        job.mark()
        told = self._told(job, problem, generation.manifest)
        return replace(told, agent_cpu_s=self._node.used_cpu_s())

    def _clear(self, step: int) -> None:
        """Give back the room that a save without manifest takes."""
        generation = self._store.find(self._store.path(step, self._stamp.epoch).name)
        if self._members.leads and generation is not None and generation.manifest is None:
            with contextlib.suppress(OSError):
                self._store.files.remove_tree(generation.path)

    # ---- one part after the other; each is collective

    def _copied(self, job: _Job) -> tuple[Captured, frozenset[str]]:
        """Fill the copies, and find out what differs from rank to rank."""
        captured = job.captured

        def copy() -> dict[str, Any]:
            if isinstance(captured, Exception):
                raise captured
            self._staging.copy()
            crash_at("staged")
            if self._ranks.rank == 0 and not self._begun:
                self._observer.first()
            params, buffers = fingerprint(captured.params()), fingerprint(captured.buffers())
            prints = captured.prints()
            return {"step": job.step, "prints": prints, "params": params, "buffers": buffers}

        told = self._ranks.agree(f"saving step {job.step}", copy)
        assert not isinstance(captured, Exception)
        self._begun = True
        if len({one["step"] for one in told}) > 1:
            steps = ", ".join(f"rank {rank}: {one['step']}" for rank, one in enumerate(told[:4]))
            raise UsageError(
                f"ranks save different steps ({steps}): save on all ranks after the same step"
            )
        if len({one["params"] for one in told}) > 1:
            captured = captured.with_params(self._ranks.gather(captured.params()))
        captured = self._own_buffers(captured, alike=len({one["buffers"] for one in told}) == 1)
        names = told[0]["prints"]
        return captured, frozenset(
            name for name in names if len({one["prints"].get(name) for one in told}) > 1
        )

    def _own_buffers(self, captured: Captured, *, alike: bool) -> Captured:
        """Leave out the buffers that a rank before this one has: replicas differ in them.

        DistributedDataParallel gives every rank those of the first before a step; DCP would save each
        buffer from whatever rank has least to write.
        """
        if alike:
            return captured.without(captured.buffers() if self._ranks.rank else ())
        told = self._ranks.gather({"buffers": captured.buffers()})
        before = [key for one in told[: self._ranks.rank] for key in one["buffers"]]
        return captured.without(set(before))

    def _written(
        self, job: _Job, captured: Captured, differ: frozenset[str]
    ) -> tuple[list[Item], bytes]:
        """Let DCP write this rank's part; its metadata comes from the first rank, byte for byte."""

        def prepare() -> None:
            if self._members.leads:
                self._store.begin(job.step, self._stamp.epoch)

        state, paths = captured.flat(self._ranks.rank, differ | {"rng"})
        metadata, items = dcp.save(
            state,
            paths,
            self._planner,
            self._store.path(job.step, self._stamp.epoch),
            self._store.files,
            group=self._ranks.group,
            prepare=prepare,
            what=f"writing step {job.step}",
        )
        first = self._ranks.rank == 0
        # As bytes of a file: no rank unpickles what it was sent. It is read by the list of `metadata.py`.
        return items, self._ranks.from_first(pickle.dumps(metadata) if first else None)

    def _committed(self, step: int, items: list[Item], metadata: bytes) -> Generation:
        """Let every node have the metadata and a manifest of all nodes."""
        told = self._ranks.agree(
            f"noting the files of step {step}",
            lambda: {
                "items": [[i.name, i.length, i.digest] for i in items],
                "id": secrets.token_hex(8),
            },
        )
        by_rank = [[Item(*one) for one in rank["items"]] for rank in told]
        manifest = self._manifest(step, told[0]["id"], by_rank, metadata)

        def commit() -> dict[str, Any]:
            if self._members.leads:
                path = self._store.path(step, manifest.epoch)
                self._store.files.write(path / METADATA, [metadata])
                self._store.commit(manifest)
            return {}

        self._ranks.agree(f"committing step {step}", commit)
        return Generation(self._store.place, step, manifest.epoch, manifest)

    def _manifest(
        self, step: int, save: str, by_rank: Sequence[Sequence[Item]], metadata: bytes
    ) -> Manifest:
        stamp, members = self._stamp, self._members
        held = tuple(
            Member(
                number,
                host,
                ranks,
                tuple(sorted((i for rank in ranks for i in by_rank[rank]), key=lambda i: i.name)),
            )
            for number, (host, ranks) in enumerate(zip(members.hosts, members.ranks, strict=True))
        )
        return Manifest(
            run=stamp.run,
            epoch=stamp.epoch,
            step=step,
            save=save,
            layout=stamp.layout,
            world=self._ranks.size,
            scheme=stamp.scheme,
            sets=stamp.sets,
            members=held,
            metadata=_item(METADATA, metadata),
            me=members.me,
            extra=_for_people(),
        )

    def _encoding(self, manifest: Manifest) -> Future[Protection] | None:
        """What the agent is asked to keep; a problem that it tells becomes an exception."""
        asked = self._node.protect(manifest)
        if asked is None:
            return None
        made: Future[Protection] = Future()

        def judge(answer: Future[Protection]) -> None:
            problem = answer.exception()
            if problem is None and answer.result().problem:
                problem = CheckpointError(answer.result().problem)
            if problem is None:
                made.set_result(answer.result())
            else:
                made.set_exception(problem)

        asked.add_done_callback(judge)
        return made

    def _protected(self, generation: Generation) -> str:
        """Let nodes keep what protects each other; why they could not, or nothing."""
        manifest = generation.manifest
        assert manifest is not None
        try:
            self._node.start(self._ranks)
            made = self._ranks.agree_later(
                f"encoding step {manifest.step}", lambda: self._encoding(manifest)
            )
        except CheckpointError as problem:
            return f"step {manifest.step} is saved, but not protected: {problem}"
        redundancy = () if made is None else made.redundancy

        def settle() -> dict[str, Any]:
            if self._members.leads:
                self._store.advance(generation, "protected", redundancy)
            return {}

        try:
            self._ranks.agree(f"noting the protection of step {manifest.step}", settle)
        except CheckpointError as problem:
            return f"step {manifest.step} is saved, but not noted as protected: {problem}"
        self._observer.protected(manifest)
        return ""


def _not_saved(step: int, problem: Exception) -> str:
    if isinstance(problem, UsageError):
        return described(problem)
    return f"step {step} was not saved{GOES_ON}: {described(problem)}"


def _item(name: str, content: bytes) -> Item:
    return Item(name, len(content), xxhash.xxh3_128_hexdigest(content))


def _for_people() -> dict[str, str]:
    return {
        "program": " ".join(sys.argv[:1]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
