"""The trainer's desk: where loaders and validators get helpers for their leases.

    loader 0 ─┐          ┌─ line 0 ── helper 0: at most 2 leases of this trainer, one at work, one queued
    loader 1 ─┼─ desk ───┼─ line 1 ── helper 1
    validator ┘          └─ line 2 ── absent: called again and again

The desk knows nothing of what leases are about. Whenever a helper has room it asks its clients for one:
loaders whose loop is short of batches first, then validators, then other loaders; in turn among alike.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.closing import Closing
from fivefold.helpers.calling import Dial, dialled
from fivefold.helpers.lines import OUTSTANDING, ClientId, Line, Supply
from fivefold.helpers.messages import Kind, LinkClosed, LinkError, Message
from fivefold.helpers.switchboard import Switchboard
from fivefold.helpers.telling import Telling
from fivefold.trace.helping import HelperFigures, SupplyFigures

if TYPE_CHECKING:
    from fivefold.helpers.link import Link
    from fivefold.mesh import Mesh

__all__ = ["Client", "Desk"]


class Client(Protocol):
    """What grants leases: a loader, or a validator. The desk calls it under its lock, from any thread."""

    service: str
    """"loader" or "validator" """
    number: int
    """in order of creation among those of its service, the same in trainer and helper"""

    @property
    def urgent(self) -> bool:
        """Whether its consumer has fewer batches ready than it wants."""
        ...

    def opening(self) -> dict[str, Any]:
        """`identity` and `axes` of an OPEN."""
        ...

    def ready(self, helper: int, told: dict[str, Any]) -> None:
        """A helper can serve it; what READY tells."""
        ...

    def refused(self, helper: int, why: str) -> None:
        """A helper cannot serve it."""
        ...

    def grant(self, helper: int, link: Link) -> int | None:
        """Send one lease to a helper that is ready; its id, None if there is nothing to do.

        Raises `LinkClosed` as `link.send` does; then `lost` follows.
        """
        ...

    def place(self, helper: int, kind: Kind, told: dict[str, Any], size: int) -> memoryview | None:
        """Where a payload of `size` bytes of an answer shall lie; None: anywhere."""
        ...

    def answered(self, helper: int, message: Message) -> bool:
        """A lease is over: DONE or FAILED. Whether the answer is of use; not if another came before."""
        ...

    def damaged(self, helper: int, lease: int) -> bool:
        """The answer to a lease was damaged on the way, the lease is over. Whether it is missed."""
        ...

    def lost(self, helper: int, why: str) -> None:
        """A helper is gone, with its leases. Not called where it was not ready."""
        ...


class Desk(Closing):
    """Lines to the helpers of a job, for all clients of one trainer.

    Args:
        addresses: of all helpers; the position is the helper's number.
        key: of the job, 32 bytes.
        dial: connects to one address, or raises `LinkClosed` or `OSError`; `UsageError` ends the attempts.
    """

    def __init__(self, addresses: Sequence[str], key: bytes, *, dial: Dial = dialled) -> None:
        self.lock = threading.RLock()
        self.supply = Supply()
        """of the loops of all loaders; changed under the lock"""
        self._telling = Telling(self._figures)
        self._lines = [Line(number, address) for number, address in enumerate(addresses)]
        self._clients: dict[ClientId, weakref.ref[Client]] = {}
        self._turns: dict[ClientId, int] = {}
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._ids = itertools.count(1)
        self._board = Switchboard(self._lines, key, dial, self, self.lock)

    @staticmethod
    def of(mesh: Mesh) -> Desk | None:
        """The desk of this process, made on first use; None where no helpers are named, or in a helper.

        Raises `UsageError` if FIVEFOLD_HELPERS or FIVEFOLD_HELPER_KEY makes no sense.
        """
        global _desk  # noqa: PLW0603 - one per process
        named = os.environ.get("FIVEFOLD_HELPERS", "")
        if not named or mesh.role == "helper":
            return None
        with _making:
            if _desk is None or _desk.closed:
                from fivefold.helpers.greeting import parse_key

                addresses = [part.strip() for part in named.split(",") if part.strip()]
                _desk = Desk(addresses, parse_key(os.environ.get("FIVEFOLD_HELPER_KEY", "")))
                atexit.register(_desk.close)
            return _desk

    # ---- for clients

    def number(self, service: str) -> int:
        """The number of a new client of a service. Trainer and helper count in order of creation."""
        with self.lock:
            return next(self._numbers[service])

    def lease(self) -> int:
        """A new lease id."""
        return next(self._ids)

    def join(self, client: Client) -> None:
        """Ask this client for leases from now on, as long as somebody holds it, or until it leaves."""
        with self.lock:
            who = (client.service, client.number)
            if self._find(who) is client:
                return
            self._clients[who] = weakref.ref(client)
            self._turns[who] = 0
            for line in self._lines:
                if line.link is not None:
                    self._open(line, client)

    def leave(self, client: Client) -> None:
        """Ask it no more. What answers to its leases bring is dropped."""
        with self.lock:
            who = (client.service, client.number)
            self._clients.pop(who, None)
            for line in self._lines:
                line.ready.discard(who)

    def cancel(self, client: Client, lease: int) -> None:
        """Tell whoever holds a lease that it is not needed any more. It is over when it is answered."""
        told = {"service": client.service, "number": client.number, "lease": lease}
        with self.lock:
            for line in self._lines:
                if lease in line.out:
                    self._board.send(line, Kind.CANCEL, told)

    def feed(self) -> None:
        """Grant what there is to grant; a client calls it when it has something new."""
        with self.lock:
            for line in self._lines:
                self._feed(line)

    def retire(self, helper: int, why: str) -> None:
        """Ask nothing more of a helper that does more harm than good, and say so."""
        with self.lock:
            line = self._lines[helper]
            if line.state == "serving":
                line.state, line.why = "retired", why
                self._telling.event(line, "retired", why)

    def serving(self, client: Client) -> list[int]:
        """Helpers that serve a client now."""
        who = (client.service, client.number)
        return [line.number for line in self._lines if line.wants and who in line.ready]

    def name(self, helper: int) -> str:
        """Of a helper, for people: helper 1 (dpu01:21001)."""
        return self._lines[helper].name

    def differences(self, helper: int) -> list[str]:
        """In which versions, or kind of machine, a helper differs from this process."""
        return self._lines[helper].differences

    def helpers(self) -> list[HelperFigures]:
        """What each helper has done for this trainer."""
        with self.lock:
            return [line.figures() for line in self._lines]

    # ---- telling

    def say(self, text: str) -> None:
        """A warning, issued with the next `tell`."""
        self._telling.say(text)

    def event(self, helper: int, what: str, text: str) -> None:
        """A warning about a helper, and a mark in the trace; what is a word such as "mismatch"."""
        self._telling.event(self._lines[helper], what, text)

    def tell(self, *, now: bool = False) -> None:
        """Issue warnings that have come up; write figures to the trace every 2 s, or `now`.

        For the trainer's own thread. Raises the warnings where they are errors.
        """
        self._telling.tell(now=now)

    def _figures(self) -> tuple[list[HelperFigures], SupplyFigures]:
        with self.lock:
            return [line.figures() for line in self._lines], self.supply.figures()

    # ---- for the switchboard

    def connected(self, line: Line) -> None:
        """See `Owner`."""
        self._telling.event(line, "joined", f"{line.name} has joined", warn=False)
        if line.differences:
            self._telling.event(
                line,
                "mismatch",
                f"{line.name} differs from this process ({'; '.join(line.differences)}): whether its "
                "batches are the same byte for byte is not known",
            )
        for client in self._present():
            self._open(line, client)

    def refused(self, line: Line, why: str) -> None:
        """See `Owner`."""
        line.refused(why)
        self._telling.event(line, "refused", f"{line.name} cannot help: {why}")

    def place(self, line: Line, kind: Kind, told: dict[str, Any], size: int) -> memoryview | None:
        """See `Owner`."""
        client = self._client(told)
        return None if client is None else client.place(line.number, kind, told, size)

    def handle(self, line: Line, message: Message) -> None:
        """See `Owner`."""
        client = self._client(message.told)
        if message.kind in (Kind.DONE, Kind.FAILED):
            self._over(line, client, message)
        elif message.kind == Kind.BYE:
            self._board.hang_up(line, str(message.told.get("why", "")) or "it said goodbye")
        elif client is not None and message.kind == Kind.READY:
            line.serves((client.service, client.number))
            client.ready(line.number, message.told)
            self._feed(line)
        elif client is not None and message.kind == Kind.REFUSED:
            why = str(message.told.get("why", ""))
            self.refused(line, f"{client.service} {client.number}: {why}")
            client.refused(line.number, why)

    def _over(self, line: Line, client: Client | None, message: Message) -> None:
        """A lease was answered, if it was one."""
        if line.out.pop(_lease(message.told), None) is not None:
            used = client is not None and client.answered(line.number, message)
            line.count(message, used=used)
        self._feed(line)

    def damaged(self, line: Line, problem: LinkError) -> None:
        """See `Owner`. If nobody knows which lease it answered, the line is begun anew."""
        lease = _lease(problem.told)
        if line.out.pop(lease, None) is None:
            self._telling.event(line, "damaged", str(problem))
            self._board.hang_up(line, str(problem))
            return
        client = self._client(problem.told)
        if client is not None and client.damaged(line.number, lease):
            self._telling.event(line, "damaged", f"{problem}; what it carried is made again")
        self._feed(line)

    def lost(self, line: Line, why: str) -> None:
        """See `Owner`."""
        if self.closed:
            return
        self._telling.event(line, "lost", f"{line.name} is lost: {why}; others do its work")
        clients = [client for who in list(line.ready) if (client := self._find(who))]
        line.ready.clear()
        for client in clients:
            client.lost(line.number, why)
        self.feed()

    def failed(self, text: str) -> None:
        """See `Owner`."""
        self.say(f"helpers are not used any more, by a fault of Fivefold:\n{text}")

    # ---- leases

    def _open(self, line: Line, client: Client) -> None:
        told = {"service": client.service, "number": client.number, **client.opening()}
        self._board.send(line, Kind.OPEN, told)

    def _feed(self, line: Line) -> None:
        while line.wants and len(line.out) < OUTSTANDING and self._granted(line):
            pass

    def _granted(self, line: Line) -> bool:
        """Whether a client had a lease for this helper."""
        assert line.link is not None
        for client in self._in_turn(line):
            try:
                lease = client.grant(line.number, line.link)
            except LinkClosed as problem:
                self._board.broken(line, str(problem))
                return False
            if lease is not None:
                who = (client.service, client.number)
                line.out[lease] = who
                self._turns[who] = next(self._ids)
                return True
        return False

    def _in_turn(self, line: Line) -> list[Client]:
        """Clients that this helper serves, in the order in which they are asked."""
        clients = [client for who in list(line.ready) if (client := self._find(who))]
        return sorted(clients, key=self._place_in_line) if len(clients) > 1 else clients

    def _place_in_line(self, client: Client) -> tuple[int, int]:
        loads = client.service == "loader"
        urgency = (0 if client.urgent else 2) if loads else 1
        return urgency, self._turns[client.service, client.number]

    def _present(self) -> list[Client]:
        return [client for who in list(self._clients) if (client := self._find(who))]

    def _find(self, who: ClientId) -> Client | None:
        held = self._clients.get(who)
        client = held() if held is not None else None
        if held is not None and client is None:
            del self._clients[who]
        return client

    def _client(self, told: dict[str, Any]) -> Client | None:
        service, number = told.get("service"), told.get("number")
        if isinstance(service, str) and isinstance(number, int):
            return self._find((service, number))
        return None

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether helpers are used no more."""
        return self._board.closed

    def close(self) -> None:
        """Say goodbye to all helpers: the job of this trainer is done."""
        self._board.close()


def _lease(told: dict[str, Any]) -> int:
    """The lease that a message is about; 0, which is none, if it does not say."""
    lease = told.get("lease")
    return lease if type(lease) is int else 0


_desk: Desk | None = None
_making = threading.Lock()


def _forget() -> None:
    """A forked child has the desk's memory, but not its thread, and the lines are not its own."""
    global _desk, _making
    _desk, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
