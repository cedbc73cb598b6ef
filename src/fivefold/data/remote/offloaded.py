"""The loader's producer where there are helpers: what `Workers` is without them.

    next() ── arrived? ── yes ── hand it out, grant the next
                 │ no
                 ├─ nobody holds it, or helpers are slower than the loop: make one here (idle time is free)
                 └─ else wait; a batch that takes too long is made here, or by another helper, as well

The trainer owns the order. Whoever makes a batch makes the same bytes, so helpers decide on time alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.arena.native import ArenaError
from fivefold.closing import Closing
from fivefold.data.remote.checks import First, structure_of
from fivefold.data.remote.leases import OWN, Grant, Leases
from fivefold.data.remote.loader_client import USERS_BUFFERS, Arrived, LoaderClient
from fivefold.data.remote.serving import decode_boxes
from fivefold.data.source import BatchId, Made, Source
from fivefold.data.workers import Key
from fivefold.errors import FivefoldError, UsageError
from fivefold.helpers.decode import decode
from fivefold.helpers.messages import fresh
from fivefold.helpers.receive_buffers import BufferPool
from fivefold.trace import active
from fivefold.wire.frames import Message

if TYPE_CHECKING:
    from fivefold.helpers.dispatcher import Dispatcher

__all__ = ["Offloaded"]

_LONGEST_WAIT_S = 1.0
_MOST_AHEAD = 256


class Offloaded(Closing):
    """Produces shares of `source` by the helpers of a dispatcher, and itself where they are not fast enough.

    Args:
        source: of the stream, the same in all helpers.
        dispatcher: of this process.
        number: of the loader, in order of creation.
        axes: tile axes of this rank: name to (number of tiles, which of them).
        ahead_bytes: memory for batches that are made ahead.
        pin: for copies to a GPU.
    """

    def __init__(
        self,
        source: Source,
        dispatcher: Dispatcher,
        *,
        number: int,
        axes: Mapping[str, tuple[int, int]],
        ahead_bytes: int,
        pin: bool = False,
    ) -> None:
        self._source, self._dispatcher = source, dispatcher
        self._ahead_bytes, self._pin = ahead_bytes, pin
        self._grants = LoaderClient(source, dispatcher, number, axes)
        self._rates = self._grants.rates
        self._most = 1
        self._alone = False
        self._end = 0  # of the iteration, in the table
        dispatcher.join(self._grants)

    def produce(self, keys: Sequence[Key], following: Sequence[Key] = ()) -> Iterator[Made]:
        """The batches of `keys`, in order; calling it again ends an earlier call.

        `following`: what will be asked for next, which helpers may begin when all of `keys` is granted.

        Raises:
            FivefoldError: what `Source.make` raises; a note tells what a helper said of the same batch.
        """
        self._dispatcher.join(self._grants)
        with self._dispatcher.lock:
            self._grants.begin([*keys, *following])
            table = self._grants.table
            self._end = table.head + len(keys)
            self._dispatcher.feed()
        return self._batches(table, self._end)

    def close(self) -> None:
        """Ask helpers for no more batches; `produce` begins again."""
        with self._dispatcher.lock:
            self._grants.unsettle()
            self._dispatcher.leave(self._grants)

    def _batches(self, table: Leases, end: int) -> Iterator[Made]:
        handed_s = 0.0
        self._grants.iterating = True
        try:
            while table.head < end and table is self._grants.table:
                asked_s = time.monotonic()
                if handed_s:
                    self._rates.step_s.add(asked_s - handed_s)
                made = self._next(table)
                self._dispatcher.tell()
                handed_s = time.monotonic()
                yield made
        finally:
            if table is self._grants.table:
                self._grants.iterating = False

    # ---- one batch

    def _next(self, table: Leases) -> Made:
        self._compare_first_batches()
        self._note_readiness(table)
        while True:
            arrived = self._awaited(table)
            made = arrived.made
            if made is None:
                assert arrived.message is not None
                made = self._opened(table, arrived.helper, arrived.message)
            with self._dispatcher.lock:
                if made is not None:
                    self._consumed(table, arrived.helper)
                    return made
                table.spoiled()

    def _awaited(self, table: Leases) -> Arrived:
        """What has arrived for the head of the line; makes batches meanwhile, or waits."""
        begun_s = time.monotonic()
        while True:
            with self._dispatcher.lock:
                if (arrived := self._grants.take()) is not None:
                    return arrived
                grant = self._own(table, begun_s)
                if grant is None:
                    self._stand_still(table, begun_s)
            if grant is not None:
                self._produce(table, grant)

    def _own(self, table: Leases, begun_s: float) -> Grant | None:
        now_s, rates = time.monotonic(), self._rates
        stalled = table.stalled(now_s, rates.overdue_s)
        able = [
            helper for helper in self._dispatcher.serving(self._grants) if helper not in stalled
        ]
        return table.take_own(
            now_s,
            ahead=not rates.suffices(able),
            impatient=now_s - begun_s > rates.patience_s,
            overdue_s=rates.overdue_s,
            end=self._end,  # there may be no next epoch
        )

    def _stand_still(self, table: Leases, begun_s: float) -> None:
        """Wait until the head arrives, or has taken too long; the dispatcher's lock is free meanwhile."""
        now_s, rates = time.monotonic(), self._rates
        holder, since_s = table.holder(table.head), table.held_since_s(table.head) or now_s
        late_s = min(since_s + rates.overdue_s, begun_s + rates.patience_s) - now_s
        self._grants.bell.wait(min(max(late_s, 0.0) + 1e-3, _LONGEST_WAIT_S))
        waited_s = time.monotonic() - now_s
        self._dispatcher.supply.waited_s += waited_s
        if holder is not None:
            rates.of(holder).delayed_s += waited_s

    def _produce(self, table: Leases, grant: Grant) -> None:
        """Make a batch here. An error is raised when it is that batch's turn, not before."""
        begun_s = time.monotonic()
        try:
            made = self._made(grant.key)
        except BaseException as error:
            with self._dispatcher.lock:
                if isinstance(error, FivefoldError) and grant.position > table.head:
                    table.failed(grant.lease)
                    return
                table.returned(grant.lease)
                _, why = self._grants.failures.pop(grant.position, (0, ""))
            if why:
                error.add_note(f"a helper could not make it either: {why}")
            raise
        self._rates.own_s.add(time.monotonic() - begun_s)
        if self._grants.first is None and not self._alone:
            self._settle(grant.key, made)
        with self._dispatcher.lock:
            if not made.skipped:
                self._grants.could(grant.position)
            if grant.position in self._grants.doubted and not made.skipped:
                self._grants.built(grant.position, self._structure(made.batch, grant.key))
            if (position := table.done(grant.lease)) is not None:
                self._grants.arrived[position] = Arrived(OWN, made)

    def _made(self, key: Key) -> Made:
        return self._source.make(BatchId(key.epoch, key.batch), range(key.start, key.stop))

    def _settle(self, key: Key, made: Made) -> None:
        """The first batch of all says how large buffers are, and what helpers must make of its key."""
        grants = self._grants
        try:
            first = First.of(key, made.batch, tiled=bool(grants.axes))
            self._most = max(1, min(self._ahead_bytes // first.size_bytes, _MOST_AHEAD))
            count = min(self._most, 4 * len(self._dispatcher.helpers()) + 4) + USERS_BUFFERS
            pool = BufferPool(first.size_bytes, count, pin=self._pin)
        except (UsageError, ArenaError) as problem:
            self._alone = True
            self._dispatcher.say(f"loader {grants.number} does without helpers: {problem}")
            return
        with self._dispatcher.lock:
            grants.settle(first, pool)
            grants.structures = {self._structure(made.batch, key)}
            grants.table.depth = self._depth()
            self._dispatcher.feed()

    def _depth(self) -> int:
        return self._rates.depth(self._dispatcher.serving(self._grants), self._most)

    def _consumed(self, table: Leases, helper: int) -> None:
        table.consumed()
        self._dispatcher.supply.own += helper == OWN
        if helper != OWN:
            rate = self._rates.of(helper)
            rate.saved_s += self._rates.own_s.value or 0.0
            if rate.delays():
                self._dispatcher.retire(
                    helper,
                    f"{self._dispatcher.name(helper)} gets no more work: waiting for its batches took "
                    f"{rate.delayed_s:.1f} s, and making them here would have taken {rate.saved_s:.1f} s",
                )
        if self._grants.first is not None:
            table.depth = self._depth()
            self._dispatcher.feed()

    def _opened(self, table: Leases, helper: int, message: Message) -> Made | None:
        """The batch in a message for the head of the line; None if it makes no sense, or is built otherwise
        than any that was made here: then it is made here, to see.
        """
        made = self._unpacked(message)
        if made is not None:
            try:
                structure = self._structure(made.batch, table.key(table.head))
            except UsageError as problem:  # what this process could not have sent
                structure = str(problem)
            if structure not in self._grants.structures:
                self._grants.doubted[table.head] = helper, structure
                return None
        return made

    def _structure(self, batch: Any, key: Key) -> str:
        return structure_of(batch[0] if self._grants.axes else batch, key)

    def _unpacked(self, message: Message) -> Made | None:
        """The batch in a message; None if it makes no sense."""
        first, pool = self._grants.first, self._grants.pool
        assert first is not None and pool is not None
        payload = message.payload
        if len(payload) <= pool.buffer_bytes and pool.free < USERS_BUFFERS - 1:
            # The loop keeps what it was given: helpers would soon have nothing to write to.
            kept = fresh(len(payload))
            kept[:] = payload
            payload = kept
        try:
            batch = decode(message.fields, payload, first.types)
            if self._grants.axes:
                batch = batch, decode_boxes(message.fields["boxes"], first.boxes)
        except Exception as problem:  # noqa: BLE001 - nothing that a helper says may end the loop
            self._dispatcher.say(
                f"a helper's batch is not to be understood and is made here: {problem}"
            )
            return None
        return Made(batch)

    # ---- looking

    def _compare_first_batches(self) -> None:
        """Compare what helpers have made of the first batch with what was made here."""
        grants, dispatcher = self._grants, self._dispatcher
        while grants.answers and grants.first is not None:
            helper, message = grants.answers.pop()
            first, made = grants.first, self._unpacked(message)
            if made is None or first.same(First.of(first.key, made.batch, tiled=bool(grants.axes))):
                continue
            again = First.of(first.key, self._made(first.key).batch, tiled=bool(grants.axes))
            text = first.verdict(again, dispatcher.name(helper), dispatcher.differences(helper))
            dispatcher.event(helper, "mismatch", text)

    def _note_readiness(self, table: Leases) -> None:
        with self._dispatcher.lock:
            ready = table.in_order
            self._dispatcher.supply.asked(ready, table.depth)
        if (trace := active()) is not None:
            trace.ready(ready)
