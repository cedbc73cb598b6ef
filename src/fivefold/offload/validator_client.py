"""The trainer's side of validation on helpers: snapshots go out, slices are leased, sums come back.

    begin ──► version 3 ──► weights, once to each helper ──► slices of some batches ──► sums by batch
                                                             lost, late or failed: others, or the trainer

A `Client` of the dispatcher, called from its thread; whoever trains calls `begin`, `next_turn`, `add`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fivefold.helpers.messages import Kind
from fivefold.offload.slices import Slices, Sums
from fivefold.wire.frames import Message

if TYPE_CHECKING:
    from fivefold.helpers.dispatcher import Dispatcher
    from fivefold.helpers.link import Link
    from fivefold.offload.snapshot import Snapshot

__all__ = ["SERVICE", "Turn", "ValidationRun", "ValidatorClient"]

SERVICE = "validator"
SLICE_S = 0.1
"""how long a slice shall take, unless one batch takes longer: augmentation waits for it"""
PIECE_BYTES = 4 << 20
"""of weights in one message"""
WAIT_S = 1.0
"""how long ranks wait before they hear again that there is nothing yet"""
PATIENCE_S = 1.0
"""after that long, or `LATE` times the longest slice so far, others get what a helper was given"""
LATE = 4.0
UNMEASURED_S = 10.0
"""that long while no slice was answered yet"""
FAILURES = 3
"""slices that a helper may fail at"""


@dataclass
class ValidationRun:
    """One validation under way."""

    version: int
    epoch: int
    """of the test data"""
    snapshot: Snapshot
    slices: Slices
    arithmetic: Mapping[str, Any]
    """what each lease tells: threads, precision and memory format"""
    sent: set[int] = field(default_factory=set[int])
    """helpers that have the weights"""


@dataclass(frozen=True)
class Turn:
    """What all ranks do next: evaluate some batches, or nothing."""

    batches: list[int]
    total: list[float] | None = None
    """the sums over all batches, once they are complete"""
    by_helpers: int = 0
    """how many of them helpers evaluated"""


class ValidatorClient:
    """Validations that helpers share.

    Args:
        dispatcher: of this trainer.
        identity: what the helper's validator has to have in common with this one.
        joins: whether the trainer evaluates as well while it waits, beside helpers that are like it: only
            where that gives the same bits.
    """

    service = SERVICE

    def __init__(self, dispatcher: Dispatcher, identity: Mapping[str, Any], *, joins: bool) -> None:
        self.number = dispatcher.number(SERVICE)
        self._dispatcher, self._identity, self._joins = dispatcher, identity, joins
        self._news = threading.Condition()
        self._works: list[ValidationRun] = []
        self._leases: dict[int, tuple[ValidationRun, int]] = {}
        """lease -> what it is about, and the helper"""
        self._ready: set[int] = set()
        self._failed: Counter[int] = Counter()
        self._batch_s = 0.0
        """of the last slice, for one batch"""
        self._longest_s = 0.0
        """the longest that a slice took from grant to answer"""
        dispatcher.join(self)

    # ---- for whoever trains

    def begin(self, work: ValidationRun) -> None:
        """Lease the batches of `work` from now on."""
        with self._news:
            self._works.append(work)
        self._dispatcher.feed()

    def next_turn(self, work: ValidationRun, share: int) -> Turn:
        """Wait a while for the sums of `work`; what to do next.

        `share`: batches that the ranks evaluate together in a turn.
        """
        end = time.monotonic() + WAIT_S
        try:
            with self._news:
                while True:
                    slices = work.slices
                    if slices.complete:
                        self._works.remove(work)
                        return Turn([], slices.total(), slices.by_helpers)
                    if taken := self._taken(work, share):
                        return Turn(taken)
                    now = time.monotonic()
                    if slices.overdue(now - self._patience_s()):
                        continue
                    if now >= end:
                        return Turn([])
                    self._news.wait(min(end, self._patient_until(work)) - now)
        finally:
            self._dispatcher.feed()
            self._dispatcher.tell()

    def add(self, work: ValidationRun, batches: list[int], sums: Sums) -> None:
        """What the ranks have evaluated."""
        with self._news:
            work.slices.add(batches, sums)

    @property
    def helpers(self) -> int:
        """How many helpers evaluate now."""
        return len(self._ready)

    def drop(self) -> None:
        """Forget what is under way; answers to leases on it come to nothing."""
        with self._news:
            self._works.clear()

    def close(self) -> None:
        """Lease no more."""
        self.drop()
        self._dispatcher.leave(self)

    def _taken(self, work: ValidationRun, share: int) -> list[int]:
        """Batches for the ranks: of all that is free if nobody helps, or if they join in."""
        slices, most = work.slices, share * self._batches()
        helping = self._ready - slices.late()
        joins = self._joins and not any(map(self._dispatcher.differences, helping))
        if joins or not helping:
            return slices.take(most)
        return slices.take(min(most, slices.failed))

    def _batches(self) -> int:
        """In a slice."""
        return max(1, int(SLICE_S / self._batch_s)) if self._batch_s else 1

    def _patience_s(self) -> float:
        return max(PATIENCE_S, LATE * self._longest_s) if self._longest_s else UNMEASURED_S

    def _patient_until(self, work: ValidationRun) -> float:
        since = work.slices.oldest_s()
        return (time.monotonic() if since is None else since) + self._patience_s()

    # ---- for the dispatcher

    @property
    def urgent(self) -> bool:
        """Never: nobody waits for a slice as training waits for a batch."""
        return False

    def opening(self) -> dict[str, Any]:
        """See `Client`."""
        return {"identity": dict(self._identity)}

    def ready(self, helper: int, fields: dict[str, Any]) -> None:  # noqa: ARG002
        """See `Client`. It has no weights yet, even if it had some before its connection broke."""
        with self._news:
            for work in self._works:
                work.sent.discard(helper)
            if self._failed[helper] < FAILURES:
                self._ready.add(helper)

    def refused(self, helper: int, why: str) -> None:  # noqa: ARG002 - the dispatcher tells
        """See `Client`."""
        self._without(helper)

    def lost(self, helper: int, why: str) -> None:  # noqa: ARG002 - the dispatcher tells
        """See `Client`."""
        self._without(helper)

    def _without(self, helper: int) -> None:
        with self._news:
            self._ready.discard(helper)
            for lease in [n for n, (_, whose) in self._leases.items() if whose == helper]:
                self._over(lease).slices.drop(lease)
            self._news.notify_all()

    def grant(self, helper: int, link: Link) -> int | None:
        """See `Client`: a slice of the oldest validation that has any left, and its weights before it."""
        with self._news:
            if helper not in self._ready:
                return None
            for work in self._works:
                if not work.slices.free:
                    continue
                self._send_weights(work, helper, link)
                return self._lease(work, helper, link)
        return None

    def _lease(self, work: ValidationRun, helper: int, link: Link) -> int:
        lease = self._dispatcher.lease()
        batches = work.slices.grant(lease, helper, self._batches(), time.monotonic())
        assert batches is not None, "asked under the lock"
        self._leases[lease] = work, helper
        fields = {"lease": lease, "version": work.version, "epoch": work.epoch}
        sliced = {"start": batches.start, "stop": batches.stop}
        link.send(Kind.LEASE, {**self._named(), **fields, **sliced, **work.arithmetic})
        return lease

    def _send_weights(self, work: ValidationRun, helper: int, link: Link) -> None:
        if helper in work.sent:
            return
        assert work.snapshot.flat is not None, "kept until the sums are complete"
        flat = memoryview(cast(Any, work.snapshot.flat.numpy())).cast("B")
        fields = {**self._named(), "version": work.version, "bytes": len(flat)}
        for offset in range(0, len(flat), PIECE_BYTES):
            piece = flat[offset : offset + PIECE_BYTES]
            link.send(Kind.WEIGHTS, {**fields, "offset": offset}, [piece])
        work.sent.add(helper)

    def _named(self) -> dict[str, Any]:
        return {"service": self.service, "number": self.number}

    def place(
        self,
        helper: int,  # noqa: ARG002
        kind: int,  # noqa: ARG002
        fields: dict[str, Any],  # noqa: ARG002
        size: int,  # noqa: ARG002
    ) -> memoryview | None:
        """See `Client`: anywhere."""
        return None

    def answered(self, helper: int, message: Message) -> bool:
        """See `Client`."""
        lease, fields = int(message.fields["lease"]), message.fields
        with self._news:
            if lease not in self._leases:
                return False
            slices = (work := self._over(lease)).slices
            sums = _sums(message, slices.size(lease))
            if message.kind == Kind.DONE and sums is not None:
                self._measure(len(sums), fields, time.monotonic() - slices.since_s(lease))
                news = work.slices.done(lease, sums)
            else:
                news = False
                self._unanswered(helper, lease, work, fields)
            self._news.notify_all()
            return news

    def _unanswered(
        self, helper: int, lease: int, work: ValidationRun, fields: dict[str, Any]
    ) -> None:
        if fields.get("kind") == "Cancelled":
            work.slices.drop(lease)
            return
        work.slices.fail(lease)
        self._failed[helper] += 1
        why = fields.get("message") or "its answer makes no sense"
        text = f"{self._dispatcher.name(helper)} could not evaluate test batches, the trainer does: {why}"
        if self._failed[helper] == FAILURES:
            self._ready.discard(helper)
            text += f"; that was the third time, so it gets no more of them\n{fields.get('traceback', '')}"
        self._dispatcher.event(helper, "failed", text)

    def damaged(self, helper: int, lease: int) -> bool:  # noqa: ARG002
        """See `Client`."""
        with self._news:
            if lease not in self._leases:
                return False
            self._over(lease).slices.drop(lease)
            self._news.notify_all()
            return True

    def _over(self, lease: int) -> ValidationRun:
        return self._leases.pop(lease)[0]

    def _measure(self, batches: int, fields: Mapping[str, Any], took_s: float) -> None:
        self._batch_s = max(float(fields.get("busy_s", 0.0)), 1e-6) / batches
        self._longest_s = max(self._longest_s, took_s)


def _sums(message: Message, batches: int) -> Sums | None:
    """The sums that came, a row for each batch; None if they make no sense."""
    width, size = message.fields.get("sums"), len(message.payload)
    if not isinstance(width, int) or width < 1 or size != batches * width * 8:
        return None
    return np.frombuffer(bytes(message.payload), dtype="<f8").reshape(batches, width)


def arithmetic_fields(precision: str, memory_format: str) -> dict[str, Any]:
    """How a helper has to compute, so that it gets the trainer's bits: sums depend on the threads, too."""
    return {
        "threads": torch.get_num_threads(),
        "precision": precision,
        "memory_format": memory_format,
    }
