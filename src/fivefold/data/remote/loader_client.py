"""The side of an offloaded loader that the dispatcher sees: it grants leases and takes in answers.

The other side, the consumer, is `offloaded`. Both work on the same table, under the dispatcher's lock.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.data.remote.checks import First
from fivefold.data.remote.leases import Grant, Leases
from fivefold.data.remote.serving import identity_of
from fivefold.data.source import BatchId, Made, Source
from fivefold.data.workers import Key
from fivefold.helpers.messages import Kind
from fivefold.helpers.receive_buffers import BufferPool, ReceiveBuffer
from fivefold.wire.frames import Message

if TYPE_CHECKING:
    from fivefold.helpers.dispatcher import Dispatcher
    from fivefold.helpers.link import Link

__all__ = ["Arrived", "LoaderClient", "Rates", "depth_for"]

USERS_BUFFERS = 3
"""buffers in the loop's hands: of the batch at work, of the one it is exchanged for, and one to spare"""
_MOST_FAILURES = 3


@dataclass(frozen=True)
class Arrived:
    """A batch that waits for its turn: made here, or come from a helper."""

    helper: int
    made: Made | None = None
    message: Message | None = None


class LoaderClient:
    """Leases on the batches of one loader: a `Client`, which runs under the dispatcher's lock."""

    service = "loader"

    def __init__(
        self,
        source: Source,
        dispatcher: Dispatcher,
        number: int,
        axes: Mapping[str, tuple[int, int]],
    ) -> None:
        self.number, self.axes = number, dict(axes)
        self.rates = Rates()
        self.table = Leases(dispatcher.lease)
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
        self.bell = threading.Condition(dispatcher.lock)
        """rings when the head of the line has arrived, or somebody else has to produce it"""
        self.iterating = False
        self.first: First | None = None
        self.pool: BufferPool | None = None
        self._source, self._dispatcher = source, dispatcher
        self._out: dict[int, tuple[int, ReceiveBuffer]] = {}
        """leases that are not answered: helper, buffer"""
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
            self._dispatcher.cancel(self, lease)
        self.table = Leases(self._dispatcher.lease)
        self.arrived.clear()
        self.failures.clear()
        self.doubted.clear()

    def settle(self, first: First, pool: BufferPool) -> None:
        """From now on there is memory for answers."""
        self.first, self.pool = first, pool
        weakref.finalize(self, pool.close).atexit = False

    def unsettle(self) -> None:
        """Grant nothing any more."""
        self.forget()
        self._out.clear()
        if self.pool is not None:
            self.pool.close()
        self.first = self.pool = None

    def take(self) -> Arrived | None:
        """What has arrived for the head of the line."""
        return self.arrived.pop(self.table.head, None)

    def could(self, position: int) -> None:
        """The batch at a position, which a helper may have failed on, was produced here."""
        helper, why = self.failures.pop(position, (-1, ""))
        if helper >= 0:
            self._blame(helper, why)

    def built(self, position: int, structure: str) -> None:
        """The batch at a position, which a helper may have built otherwise, was made here and is built so."""
        self.structures.add(structure)
        helper, other = self.doubted.pop(position, (-1, structure))
        if other != structure:
            self._blame(helper, f"it has built it otherwise, {other} instead of {structure}")

    def _blame(self, helper: int, why: str) -> None:
        name = self._dispatcher.name(helper)
        text = f"{name} could not produce a batch that this process could: {why}"
        self._dispatcher.event(helper, "failed", text)
        self._failed[helper] += 1
        if self._failed[helper] >= _MOST_FAILURES:
            self._dispatcher.retire(helper, f"{name} fails too often and gets no more work")

    # ---- for the dispatcher

    @property
    def urgent(self) -> bool:
        """Whether fewer batches are ready than half of what may be."""
        return self.iterating and 2 * self.table.arrived < self.table.depth

    def opening(self) -> dict[str, Any]:
        """See `Client`."""
        return {"identity": identity_of(self._source), "axes": self.axes}

    def ready(self, helper: int, fields: dict[str, Any]) -> None:
        """See `Client`."""
        self.rates.helpers.pop(helper, None)
        self._failed.pop(helper, None)
        self._unchecked.add(helper)
        if fields.get("samples"):
            self._samples.add(helper)
        else:
            self._samples.discard(helper)

    def refused(self, helper: int, why: str) -> None:
        """See `Client`."""

    def grant(self, helper: int, link: Link) -> int | None:
        """See `Client`."""
        buffer = self._buffer()
        if buffer is None:
            return None
        given = self._check(helper) or self.table.grant(
            helper, time.monotonic(), overdue_s=self.rates.overdue_s
        )
        if given is None:
            return None
        samples = self._raw(given) if helper in self._samples else None
        self._out[given.lease] = (helper, buffer)
        self._send(link, given, buffer, samples)
        return given.lease

    def _buffer(self) -> ReceiveBuffer | None:
        if self.pool is None:
            return None
        filled = sum(arrived.message is not None for arrived in self.arrived.values())
        if len(self._out) + filled >= self.pool.count - USERS_BUFFERS:
            return None
        return self.pool.take()

    def _check(self, helper: int) -> Grant | None:
        if helper not in self._unchecked or self.first is None:
            return None
        self._unchecked.discard(helper)
        lease = self._dispatcher.lease()
        self._checks.add(lease)
        return Grant(lease, -1, self.first.key, again=True)

    def _send(
        self, link: Link, given: Grant, buffer: ReceiveBuffer, samples: list[bytes] | None
    ) -> None:
        assert self.pool is not None
        fields = {
            "service": self.service,
            "number": self.number,
            "lease": given.lease,
            **given.key._asdict(),
            "buffer": buffer.number,
            "buffer_bytes": self.pool.buffer_bytes,
        }
        link.share(self.pool)
        link.send(Kind.LEASE, fields)
        if samples is not None:
            about = {name: fields[name] for name in ("service", "number", "lease")}
            link.send(Kind.SAMPLES, {**about, "lengths": [len(s) for s in samples]}, samples)

    def _raw(self, given: Grant) -> list[bytes]:
        key, dataset = given.key, self._source.dataset
        indices = self._source.indices(BatchId(key.epoch, key.batch))
        read = getattr(dataset, "raw")  # noqa: B009 - offered by some data sets
        return [bytes(read(index)) for index in indices[key.start : key.stop] or indices[:1]]

    def place(self, helper: int, kind: int, fields: dict[str, Any], size: int) -> memoryview | None:
        """See `Client`."""
        lease = fields.get("lease")
        _, buffer = self._out.get(lease if type(lease) is int else 0, (helper, None))
        if kind != Kind.DONE or buffer is None or size > len(buffer.memory):
            return None
        return buffer.memory[:size]

    def answered(self, helper: int, message: Message) -> bool:
        """See `Client`."""
        lease = int(message.fields["lease"])
        self._out.pop(lease, None)  # what lies in the buffer is held by the message
        if lease in self._checks:
            self._checks.discard(lease)
            return self._checked(helper, message)
        if message.kind == Kind.FAILED:
            self._could_not(helper, lease, message.fields)
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
        elif message.fields.get("kind") != "Cancelled":
            self._blame(helper, _reason(message.fields))
        return True

    def _could_not(self, helper: int, lease: int, fields: dict[str, Any]) -> None:
        if fields.get("kind") == "Cancelled":
            self.table.returned(lease)
            return
        position = self.table.failed(lease)
        if position is not None:
            self.failures[position] = (helper, _reason(fields))
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


def _reason(fields: dict[str, Any]) -> str:
    """What FAILED tells, for people, with the traceback of the helper."""
    message, trace = fields.get("message", "no reason given"), fields.get("traceback", "")
    return f"{message}\n{trace}" if trace else str(message)


# ---- How fast helpers and the trainer are, and what follows: how far ahead to work, and when to worry
#
# A *service time* is the time between two answers of a helper that has work all the time; the *latency* of a
# lease runs from its grant to its answer and holds the wait in the helper's queue as well.

_RECENT = 64
_LEAST_OVERDUE_S = 0.25
_LEAST_ANSWERS, _MOST_HARM_S = 8, 1.0


class Mean:
    """An exponential mean that follows the last ten values or so."""

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Add a value; the first ones count alike."""
        self._count += 1
        self._value += (value - self._value) / min(self._count, 10)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._value if self._count else None


class Median:
    """The median of the last nine values: a step that also saved a checkpoint does not count."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=9)

    def add(self, value: float) -> None:
        """Add a value."""
        self._recent.append(value)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return statistics.median(self._recent) if self._recent else None


class HelperRate:
    """What one helper has shown so far, and whether it is of use."""

    def __init__(self) -> None:
        self.service_s = Mean()
        self.answers = 0
        self.saved_s = 0.0
        """what the trainer would have needed itself for the batches of this helper that it used"""
        self.delayed_s = 0.0
        """what the trainer stood still for batches that this helper held"""
        self._last_s = -math.inf

    def answered(self, since_s: float, now_s: float) -> None:
        """A lease granted at `since_s` was answered."""
        self.answers += 1
        self.service_s.add(now_s - max(since_s, self._last_s))
        self._last_s = now_s

    def delays(self) -> bool:
        """Whether it has cost a second more than it has saved, over 8 answers or more."""
        return self.answers >= _LEAST_ANSWERS and self.delayed_s - self.saved_s > _MOST_HARM_S


class Rates:
    """Of one stream: latencies of all helpers, the trainer's own cost, and how fast it consumes."""

    def __init__(self) -> None:
        self.own_s = Mean()
        """the trainer makes a batch itself"""
        self.step_s = Median()
        """from handing out a batch to being asked for the next: what the trainer does besides loading"""
        self.helpers: dict[int, HelperRate] = {}
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._worst: float | None = None

    def of(self, helper: int) -> HelperRate:
        """The rate of one helper."""
        return self.helpers.setdefault(helper, HelperRate())

    def answered(self, helper: int, since_s: float, now_s: float) -> None:
        """A helper answered a lease."""
        self.of(helper).answered(since_s, now_s)
        self._latencies.append(now_s - since_s)
        self._worst = None

    @property
    def latency_s(self) -> float:
        """99th percentile of recent latencies, that is the worst; before any, twice the own cost."""
        if not self._latencies:
            return 2 * (self.own_s.value or 0.0)
        if self._worst is None:
            self._worst = max(self._latencies)
        return self._worst

    @property
    def overdue_s(self) -> float:
        """Age from which on a lease is given to another as well."""
        return max(_LEAST_OVERDUE_S, 3 * self.latency_s)

    @property
    def patience_s(self) -> float:
        """How long to stand still for one batch before making it: at most twice what that takes."""
        return max(_LEAST_OVERDUE_S, 2 * (self.own_s.value or 0.0))

    def supply(self, helpers: list[int]) -> float | None:
        """Batches per second that these helpers make together; None if none has shown yet."""
        times = [self.of(helper).service_s.value for helper in helpers]
        known = [1 / max(time, 1e-9) for time in times if time is not None]
        return sum(known) if known else None

    def suffices(self, helpers: list[int]) -> bool:
        """Whether helpers are faster than the trainer consumes, so that it had better wait for them."""
        supply, step_s = self.supply(helpers), self.step_s.value
        return supply is not None and step_s is not None and supply * step_s >= 1

    def depth(self, helpers: list[int], most: int) -> int:
        """How many batches from the consumer's on may be under way or wait, at most `most`."""
        supply = (self.supply(helpers) or 0.0) + 1 / max(self.own_s.value or 1e-3, 1e-6)
        demand = min(1 / max(self.step_s.value or 0.0, 1e-6), supply)
        return depth_for(self.latency_s, demand, len(helpers), most)


def depth_for(latency_s: float, rate: float, helpers: int, most: int) -> int:
    """Little's law: what is under way is rate times latency; two more, and two for each helper at least.

    >>> depth_for(0.5, 10.0, 1, 64), depth_for(0.001, 10.0, 4, 64), depth_for(60.0, 10.0, 4, 16)
    (7, 8, 16)
    """
    return max(1, min(max(math.ceil(latency_s * rate) + 2, 2 * helpers), most))
