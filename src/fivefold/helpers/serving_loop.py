"""The work of a helper: hear all trainers, compute one lease at a time, each trainer in its turn.

    trainer 0 ══ leases ══╗
    trainer 1 ══ leases ══╬══> next in turn ── compute ── DONE or FAILED to whose lease it was
    trainer 2 ══ leases ══╝

Every lease is answered exactly once. A trainer whose link breaks without a BYE is waited for: it may be
started again.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

from fivefold.closing import Closing
from fivefold.errors import DataError, FivefoldError, UsageError
from fivefold.helpers.messages import FRAMES, Kind
from fivefold.helpers.service import Serving, offered
from fivefold.wire.frames import LinkClosed, LinkError, Message

if TYPE_CHECKING:
    from fivefold.helpers.handshake import TrainerListener
    from fivefold.helpers.link import Link

__all__ = ["ServingLoop"]

_TURN_S = 1.0
_POLLED_S = 0.002
_LATE_S = 1.0
"""how long others may take to come after the last trainer has said goodbye"""


class _Trainer:
    """One link, and the leases that came over it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.name = link.peer
        """the same when it comes again"""
        self.leases: deque[Message] = deque()
        self.opened: dict[tuple[str, int], Serving] = {}


class ServingLoop(Closing):
    """Serves what this process has offered to whoever comes to `listener`.

    `patience_s` is how long to wait for a first trainer, and for one that was lost.
    """

    def __init__(self, listener: TrainerListener, patience_s: float) -> None:
        self._listener = listener
        self._patience_s = patience_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._trainers: deque[_Trainer] = deque()
        """whose turn is next comes first"""
        self._lost: Counter[str] = Counter()
        self._goodbyes = 0
        self._stopped = False
        self._alone_since = time.monotonic()
        self._free_since = time.monotonic()

    def run(self) -> str:
        """Serve until all trainers have said goodbye, or SIGTERM; empty, or why it was in vain."""
        with self._ending_on_signal():
            while not self._stopped:
                self._hear()
                if (turn := self._next()) is not None:
                    self._answer(*turn)
                elif not self._trainers and (found := self._over()) is not None:
                    return found
        return ""

    def close(self) -> None:
        """Say goodbye to all trainers."""
        for trainer in self._trainers:
            with contextlib.suppress(FivefoldError):
                trainer.link.send(Kind.BYE, {"why": "this helper ends"})
            trainer.link.close()
        self._trainers.clear()
        self._selector.close()

    # ---- when it ends

    def _over(self) -> str | None:
        """Whether there is nobody left to wait for: empty, or who did not come; None to go on."""
        alone_s = time.monotonic() - self._alone_since
        if self._goodbyes and not self._lost.total():
            return "" if alone_s > _LATE_S else None
        if alone_s < self._patience_s:
            return None
        who = (
            ", ".join(self._lost) + " did not come back"
            if self._lost.total()
            else "no trainer came"
        )
        return f"{who} within {self._patience_s:g} s (FIVEFOLD_TIMEOUT_S), so this helper ends"

    @contextlib.contextmanager
    def _ending_on_signal(self) -> Generator[None]:
        """SIGTERM and Ctrl-C end it, in the middle of a lease too. Only the main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._end) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except _Ended:
            pass
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _end(self, _signum: int, _frame: FrameType | None) -> None:
        self._stopped = True
        raise _Ended

    # ---- what trainers say

    def _hear(self) -> None:
        """Take in what has come; wait a moment for it if there is nothing to do."""
        polled = [trainer for trainer in self._trainers if trainer.link.fileno() < 0]
        limit = 0.0 if self._ready() else _POLLED_S if polled else _TURN_S
        for key, _ in self._selector.select(limit):
            if isinstance(key.data, _Trainer):
                self._drain(key.data)
            else:
                self._admit()
        for trainer in polled:
            self._drain(trainer)

    def _admit(self) -> None:
        link = self._listener.accept(0.0)
        if link is None:
            return
        trainer = _Trainer(link)
        if self._lost[trainer.name] > 0:
            self._lost[trainer.name] -= 1
        if not self._trainers:  # before, there was nobody to wait for
            self._free_since = time.monotonic()
        self._trainers.append(trainer)
        if link.fileno() >= 0:
            self._selector.register(link.fileno(), selectors.EVENT_READ, trainer)
        self._drain(trainer)

    def _drain(self, trainer: _Trainer) -> None:
        """Take in all that has come of a trainer, and notice when it has gone."""
        while True:
            try:
                message = self._received(trainer)
            except LinkClosed:
                self._lost[trainer.name] += 1
                self._part(trainer)
                return
            if message is None:
                return
            if message.kind == Kind.BYE:
                self._goodbyes += 1
                self._part(trainer)
                return
            # A goodbye may come after what can no longer be answered.
            with contextlib.suppress(LinkClosed):
                self._take(trainer, message)

    def _received(self, trainer: _Trainer) -> Message | None:
        while True:
            try:
                return trainer.link.receive(0.0)
            except LinkError:  # damaged and dropped: the trainer will find that nobody answers
                continue

    def _take(self, trainer: _Trainer, message: Message) -> None:
        fields = message.fields
        if message.kind == Kind.OPEN:
            self._open(trainer, fields)
        elif message.kind == Kind.LEASE:
            trainer.leases.append(message)
        elif message.kind == Kind.CANCEL:
            self._cancel(trainer, fields)
        elif (serving := trainer.opened.get(_thing(fields))) is not None:
            try:
                serving.other(message, trainer.link)
            except Exception as problem:  # noqa: BLE001 - nothing that a trainer says may end a helper
                what = f"{FRAMES.name(message.kind)} of {trainer.name}"
                sys.stderr.write(f"warning: {what} was ignored: {_failure(problem)['message']}\n")

    def _open(self, trainer: _Trainer, fields: dict[str, Any]) -> None:
        thing = {"service": fields.get("service"), "number": fields.get("number")}
        try:
            serving = offered(thing["service"], thing["number"])
            ready = serving.open(fields, trainer.link)
        except Exception as problem:  # noqa: BLE001 - nothing that a trainer says may end a helper
            trainer.link.send(Kind.REFUSED, {**thing, "why": _failure(problem)["message"]})
            return
        trainer.opened[_thing(fields)] = serving
        trainer.link.send(Kind.READY, {**ready, **thing})

    def _cancel(self, trainer: _Trainer, fields: dict[str, Any]) -> None:
        for lease in trainer.leases:
            if lease.fields.get("lease") == fields.get("lease"):
                trainer.leases.remove(lease)
                failed = {"kind": "Cancelled", "message": "not needed any more", "traceback": ""}
                trainer.link.send(Kind.FAILED, {**_lease(lease.fields), **failed})
                return

    def _part(self, trainer: _Trainer) -> None:
        if trainer not in self._trainers:
            return
        self._trainers.remove(trainer)
        self._alone_since = time.monotonic()
        if trainer.link.fileno() >= 0:
            self._selector.unregister(trainer.link.fileno())
        for serving in trainer.opened.values():
            serving.left(trainer.link)
        trainer.link.close()

    # ---- leases

    def _ready(self) -> bool:
        return any(self._first(trainer) is not None for trainer in self._trainers)

    def _first(self, trainer: _Trainer) -> Message | None:
        """The oldest lease of a trainer that has all it needs."""
        for lease in trainer.leases:
            serving = trainer.opened.get(_thing(lease.fields))
            if serving is None or not serving.waits(lease.fields, trainer.link):
                return lease
        return None

    def _next(self) -> tuple[_Trainer, Message] | None:
        """The next lease, of the trainer that has waited longest for its turn."""
        for trainer in list(self._trainers):
            if (lease := self._first(trainer)) is not None:
                trainer.leases.remove(lease)
                self._trainers.remove(trainer)
                self._trainers.append(trainer)
                return trainer, lease
        return None

    def _answer(self, trainer: _Trainer, lease: Message) -> None:
        begun = time.monotonic()
        waited_s, fields = begun - self._free_since, lease.fields
        try:
            try:
                kind, answer, parts = Kind.DONE, *self._computed(trainer, fields)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the trainer has to know
                kind, answer, parts = Kind.FAILED, _failure(problem), ()
            times = {"busy_s": time.monotonic() - begun, "waited_s": waited_s}
            buffer = fields.get("buffer", -1)
            trainer.link.send(
                kind,
                {**answer, **_lease(fields), **times},
                parts,
                buffer=buffer if isinstance(buffer, int) and kind == Kind.DONE else -1,
            )
        except LinkClosed:
            self._drain(trainer)
        self._free_since = time.monotonic()

    def _computed(self, trainer: _Trainer, fields: dict[str, Any]) -> tuple[Any, Any]:
        serving = trainer.opened.get(_thing(fields))
        if serving is None:
            raise UsageError(f"a lease on {_thing(fields)}, which this trainer has not opened")
        return serving.lease(fields, trainer.link)


class _Ended(BaseException):
    """A signal has come."""


def _thing(fields: dict[str, Any]) -> tuple[Any, Any]:
    service, number = fields.get("service"), fields.get("number")
    return (service, number) if isinstance(service, str) and isinstance(number, int) else ("", -1)


def _lease(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.get(name) for name in ("service", "number", "lease")}


def _failure(problem: Exception) -> dict[str, str]:
    """What FAILED tells; notes name the sample and the batch."""
    kinds = {DataError: "DataError", UsageError: "UsageError"}
    kind = next((name for one, name in kinds.items() if isinstance(problem, one)), "LoadError")
    message = (
        str(problem)
        if isinstance(problem, FivefoldError)
        else f"{type(problem).__name__}: {problem}"
    )
    notes = "; ".join(getattr(problem, "__notes__", []))
    trace = "".join(traceback.format_exception(problem))
    return {
        "kind": kind,
        "message": (f"{message} ({notes})" if notes else message)[:_MOST_TRACEBACK],
        "traceback": trace[-_MOST_TRACEBACK:],
    }


_MOST_TRACEBACK = 1 << 16
