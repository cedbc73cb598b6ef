"""The side of an offloaded loader that the desk sees: it grants leases and takes in answers.

The other side, the consumer, is `offloaded`. Both work on the same table, under the desk's lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.data.remote.checks import First
from fivefold.data.remote.leases import Grant, Leases
from fivefold.data.remote.serving import identity_of
from fivefold.data.source import BatchId, Made, Source
from fivefold.data.workers import Key
from fivefold.helpers.messages import Kind, Message
from fivefold.helpers.rates import Rates
from fivefold.helpers.trays import Tray, Trays

if TYPE_CHECKING:
    from fivefold.helpers.desk import Desk
    from fivefold.helpers.link import Link

__all__ = ["Arrived", "Granting"]

USERS_TRAYS = 3
"""trays in the loop's hands: of the batch at work, of the one it is exchanged for, and one to spare"""
_MOST_FAILURES = 3


@dataclass(frozen=True)
class Arrived:
    """A batch that waits for its turn: made here, or come from a helper."""

    helper: int
    made: Made | None = None
    message: Message | None = None


class Granting:
    """Leases on the batches of one loader, a client of the desk. All of it runs under the desk's lock."""

    service = "loader"

    def __init__(
        self, source: Source, desk: Desk, number: int, axes: Mapping[str, tuple[int, int]]
    ) -> None:
        self.number, self.axes = number, dict(axes)
        self.rates = Rates()
        self.table = Leases(desk.lease)
        self.arrived: dict[int, Arrived] = {}
        """by position in the table"""
        self.failures: dict[int, tuple[int, str]] = {}
        """position -> the helper that could not produce it, and what it told"""
        self.answers: list[tuple[int, Message]] = []
        """first batches that helpers made again, to be compared"""
        self.structures: set[str] = set()
        """how batches are built that were made here"""
        self.doubted: dict[int, tuple[int, str]] = {}
        """position -> the helper whose batch is built otherwise, and how"""
        self.bell = threading.Condition(desk.lock)
        """rings when the head of the line has arrived, or somebody else has to produce it"""
        self.iterating = False
        self.first: First | None = None
        self.trays: Trays | None = None
        self._source, self._desk = source, desk
        self._out: dict[int, tuple[int, Tray]] = {}  # leases that are not answered: helper, tray
        self._checks: set[int] = set()  # leases on the first batch
        self._unchecked: set[int] = set()
        self._samples: set[int] = set()  # helpers that cannot read the data set
        self._failed: Counter[int] = Counter()

    # ---- for the consumer

    def begin(self, keys: list[Key]) -> None:
        """Make `keys` the row that is consumed; what has been granted of it already is kept."""
        coming, head = self.table.coming(), self.table.head
        # An error may have come between taking a batch and handing it out.
        dropped = self.table.has_arrived(head) and head not in self.arrived
        if not coming or dropped or coming != keys[: len(coming)]:
            self.forget()
            coming = []
        self.table.extend(keys[len(coming) :])

    def forget(self) -> None:
        """Begin a new table: answers to leases that are out come to nothing."""
        for lease in self._out:
            self._desk.cancel(self, lease)
        self.table = Leases(self._desk.lease)
        self.arrived.clear()
        self.failures.clear()
        self.doubted.clear()

    def settle(self, first: First, trays: Trays) -> None:
        """From now on there is memory for answers."""
        self.first, self.trays = first, trays
        weakref.finalize(self, trays.close).atexit = False

    def unsettle(self) -> None:
        """Grant nothing any more."""
        self.forget()
        self._out.clear()
        if self.trays is not None:
            self.trays.close()
        self.first = self.trays = None

    def take(self) -> Arrived | None:
        """What has arrived for the head of the line."""
        return self.arrived.pop(self.table.head, None)

    def could(self, position: int) -> None:
        """The batch at a position, which a helper may have failed on, was produced here."""
        helper, told = self.failures.pop(position, (-1, ""))
        if helper >= 0:
            self._blame(helper, told)

    def built(self, position: int, structure: str) -> None:
        """The batch at a position, which a helper may have built otherwise, was made here and is built so."""
        self.structures.add(structure)
        helper, other = self.doubted.pop(position, (-1, structure))
        if other != structure:
            self._blame(helper, f"it has built it otherwise, {other} instead of {structure}")

    def _blame(self, helper: int, told: str) -> None:
        name = self._desk.name(helper)
        text = f"{name} could not produce a batch that this process could: {told}"
        self._desk.event(helper, "failed", text)
        self._failed[helper] += 1
        if self._failed[helper] >= _MOST_FAILURES:
            self._desk.retire(helper, f"{name} fails too often and gets no more work")

    # ---- for the desk

    @property
    def urgent(self) -> bool:
        """Whether fewer batches are ready than half of what may be."""
        return self.iterating and 2 * self.table.arrived < self.table.depth

    def opening(self) -> dict[str, Any]:
        """See `Client`."""
        return {"identity": identity_of(self._source), "axes": self.axes}

    def ready(self, helper: int, told: dict[str, Any]) -> None:
        """See `Client`."""
        self.rates.helpers.pop(helper, None)
        self._failed.pop(helper, None)
        self._unchecked.add(helper)
        if told.get("samples"):
            self._samples.add(helper)
        else:
            self._samples.discard(helper)

    def refused(self, helper: int, why: str) -> None:
        """See `Client`."""

    def grant(self, helper: int, link: Link) -> int | None:
        """See `Client`."""
        tray = self._tray()
        if tray is None:
            return None
        given = self._check(helper) or self.table.grant(
            helper, time.monotonic(), overdue_s=self.rates.overdue_s
        )
        if given is None:
            return None
        samples = self._raw(given) if helper in self._samples else None
        self._out[given.lease] = (helper, tray)
        self._send(link, given, tray, samples)
        return given.lease

    def _tray(self) -> Tray | None:
        if self.trays is None:
            return None
        filled = sum(arrived.message is not None for arrived in self.arrived.values())
        if len(self._out) + filled >= self.trays.count - USERS_TRAYS:
            return None
        return self.trays.take()

    def _check(self, helper: int) -> Grant | None:
        if helper not in self._unchecked or self.first is None:
            return None
        self._unchecked.discard(helper)
        lease = self._desk.lease()
        self._checks.add(lease)
        return Grant(lease, -1, self.first.key, again=True)

    def _send(self, link: Link, given: Grant, tray: Tray, samples: list[bytes] | None) -> None:
        assert self.trays is not None
        told = {
            "service": self.service,
            "number": self.number,
            "lease": given.lease,
            **given.key._asdict(),
            "tray": tray.number,
            "tray_bytes": self.trays.tray_bytes,
        }
        link.share(self.trays)
        link.send(Kind.LEASE, told)
        if samples is not None:
            about = {name: told[name] for name in ("service", "number", "lease")}
            link.send(Kind.SAMPLES, {**about, "lengths": [len(s) for s in samples]}, samples)

    def _raw(self, given: Grant) -> list[bytes]:
        key, dataset = given.key, self._source.dataset
        indices = self._source.indices(BatchId(key.epoch, key.batch))
        read = getattr(dataset, "raw")  # noqa: B009 - offered by some data sets
        return [bytes(read(index)) for index in indices[key.start : key.stop] or indices[:1]]

    def place(self, helper: int, kind: Kind, told: dict[str, Any], size: int) -> memoryview | None:
        """See `Client`."""
        lease = told.get("lease")
        _, tray = self._out.get(lease if type(lease) is int else 0, (helper, None))
        if kind != Kind.DONE or tray is None or size > len(tray.memory):
            return None
        return tray.memory[:size]

    def answered(self, helper: int, message: Message) -> bool:
        """See `Client`."""
        lease = int(message.told["lease"])
        self._out.pop(lease, None)  # what lies in the tray is held by the message
        if lease in self._checks:
            self._checks.discard(lease)
            return self._checked(helper, message)
        if message.kind == Kind.FAILED:
            self._could_not(helper, lease, message.told)
            return False
        since_s = self.table.since_s(lease)
        if since_s is not None:
            self.rates.answered(helper, since_s, time.monotonic())
        position = self.table.done(lease)
        if position is None:
            return False
        self.arrived[position] = Arrived(helper, message=message)
        self._ring_for(position)
        return True

    def _checked(self, helper: int, message: Message) -> bool:
        if message.kind == Kind.DONE:
            self.answers.append((helper, message))
        elif message.told.get("kind") != "Cancelled":
            self._blame(helper, _reason(message.told))
        return True

    def _could_not(self, helper: int, lease: int, told: dict[str, Any]) -> None:
        if told.get("kind") == "Cancelled":
            self.table.returned(lease)
            return
        position = self.table.failed(lease)
        if position is not None:
            self.failures[position] = (helper, _reason(told))
            self._ring_for(position)

    def damaged(self, helper: int, lease: int) -> bool:  # noqa: ARG002
        """See `Client`."""
        wanted = self._out.pop(lease, None) is not None
        self._checks.discard(lease)
        self.table.returned(lease)
        self.bell.notify_all()
        return wanted

    def lost(self, helper: int, why: str) -> None:  # noqa: ARG002
        """See `Client`."""
        self.table.lost(helper)
        self._out = {lease: out for lease, out in self._out.items() if out[0] != helper}
        self._unchecked.discard(helper)
        self.bell.notify_all()

    def _ring_for(self, position: int) -> None:
        if position == self.table.head:
            self.bell.notify_all()


def _reason(told: dict[str, Any]) -> str:
    """What FAILED tells, for people, with the traceback of the helper."""
    message, trace = told.get("message", "no reason given"), told.get("traceback", "")
    return f"{message}\n{trace}" if trace else str(message)
