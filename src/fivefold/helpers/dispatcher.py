"""The trainer's dispatcher: where loaders and validators get helpers for their leases.

    loader 0 ─┐                ┌─ helper 0: at most 2 leases of this trainer, one at work, one queued
    loader 1 ─┼── dispatcher ──┼─ helper 1
    validator ┘                └─ helper 2: absent, dialled again and again

It knows nothing of what leases are about. Whenever a helper has room it asks its clients for one: loaders
whose loop is short of batches first, then validators, then other loaders; in turn among alike.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.closing import Closing
from fivefold.errors import OffloadWarning, warn
from fivefold.helpers.event_loop import Dial, EventLoop, dialled
from fivefold.helpers.messages import Kind
from fivefold.helpers.peers import OUTSTANDING, ClientId, Peer, SupplyTally
from fivefold.trace import active
from fivefold.trace.helping import HelperFigures, SupplyFigures, tell
from fivefold.trace.trace import Trace
from fivefold.wire.frames import LinkClosed, LinkError, Message

if TYPE_CHECKING:
    from fivefold.helpers.link import Link
    from fivefold.mesh import Mesh

__all__ = ["Client", "Dispatcher"]


class Client(Protocol):
    """What grants leases: a loader, or a validator. Called under the dispatcher's lock, from any thread."""

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

    def ready(self, helper: int, fields: dict[str, Any]) -> None:
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

    def place(self, helper: int, kind: int, fields: dict[str, Any], size: int) -> memoryview | None:
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


class Dispatcher(Closing):
    """Lines to the helpers of a job, for all clients of one trainer.

    Args:
        addresses: of all helpers; the position is the helper's number.
        key: of the job, 32 bytes.
        dial: connects to one address, or raises `LinkClosed` or `OSError`; `UsageError` ends the attempts.
    """

    def __init__(self, addresses: Sequence[str], key: bytes, *, dial: Dial = dialled) -> None:
        self.lock = threading.RLock()
        self.supply = SupplyTally()
        """of the loops of all loaders; changed under the lock"""
        self._events = Events(self._figures)
        self._peers = [Peer(number, address) for number, address in enumerate(addresses)]
        self._clients: dict[ClientId, weakref.ref[Client]] = {}
        self._turns: dict[ClientId, int] = {}
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._ids = itertools.count(1)
        self._loop = EventLoop(self._peers, key, dial, self, self.lock)

    @staticmethod
    def of(mesh: Mesh) -> Dispatcher | None:
        """The dispatcher of this process, made on first use; None where no helpers are named, or in a helper.

        Raises `UsageError` if FIVEFOLD_HELPERS or FIVEFOLD_HELPER_KEY makes no sense.
        """
        global _dispatcher  # noqa: PLW0603 - one per process
        named = os.environ.get("FIVEFOLD_HELPERS", "")
        if not named or mesh.role == "helper":
            return None
        with _making:
            if _dispatcher is None or _dispatcher.closed:
                from fivefold.helpers.handshake import parse_key

                addresses = [part.strip() for part in named.split(",") if part.strip()]
                _dispatcher = Dispatcher(
                    addresses, parse_key(os.environ.get("FIVEFOLD_HELPER_KEY", ""))
                )
                atexit.register(_dispatcher.close)
            return _dispatcher

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
            for peer in self._peers:
                if peer.link is not None:
                    self._open(peer, client)

    def leave(self, client: Client) -> None:
        """Ask it no more. What answers to its leases bring is dropped."""
        with self.lock:
            who = (client.service, client.number)
            self._clients.pop(who, None)
            for peer in self._peers:
                peer.ready.discard(who)

    def cancel(self, client: Client, lease: int) -> None:
        """Tell whoever holds a lease that it is not needed any more. It is over when it is answered."""
        fields = {"service": client.service, "number": client.number, "lease": lease}
        with self.lock:
            for peer in self._peers:
                if lease in peer.out:
                    self._loop.send(peer, Kind.CANCEL, fields)

    def feed(self) -> None:
        """Grant what there is to grant; a client calls it when it has something new."""
        with self.lock:
            for peer in self._peers:
                self._feed(peer)

    def retire(self, helper: int, why: str) -> None:
        """Ask nothing more of a helper that does more harm than good, and say so."""
        with self.lock:
            peer = self._peers[helper]
            if peer.state == "serving":
                peer.state, peer.why = "retired", why
                self._events.event(peer, "retired", why)

    def serving(self, client: Client) -> list[int]:
        """Helpers that serve a client now."""
        who = (client.service, client.number)
        return [peer.number for peer in self._peers if peer.wants and who in peer.ready]

    def name(self, helper: int) -> str:
        """Of a helper, for people: helper 1 (dpu01:21001)."""
        return self._peers[helper].name

    def differences(self, helper: int) -> list[str]:
        """In which versions, or kind of machine, a helper differs from this process."""
        return self._peers[helper].differences

    def helpers(self) -> list[HelperFigures]:
        """What each helper has done for this trainer."""
        with self.lock:
            return [peer.figures() for peer in self._peers]

    # ---- warnings and trace

    def say(self, text: str) -> None:
        """A warning, issued with the next `tell`."""
        self._events.say(text)

    def event(self, helper: int, what: str, text: str) -> None:
        """A warning about a helper, and a mark in the trace; what is a word such as "mismatch"."""
        self._events.event(self._peers[helper], what, text)

    def tell(self, *, now: bool = False) -> None:
        """Issue warnings that have come up; write figures to the trace every 2 s, or `now`.

        For the trainer's own thread. Raises the warnings where they are errors.
        """
        self._events.tell(now=now)

    def _figures(self) -> tuple[list[HelperFigures], SupplyFigures]:
        with self.lock:
            return [peer.figures() for peer in self._peers], self.supply.figures()

    # ---- for the event loop

    def connected(self, peer: Peer) -> None:
        """See `EventHandler`."""
        self._events.event(peer, "joined", f"{peer.name} has joined", warn=False)
        if peer.differences:
            self._events.event(
                peer,
                "mismatch",
                f"{peer.name} differs from this process ({'; '.join(peer.differences)}): whether its "
                "batches are the same byte for byte is not known",
            )
        for client in self._present():
            self._open(peer, client)

    def refused(self, peer: Peer, why: str) -> None:
        """See `EventHandler`."""
        peer.refused(why)
        self._events.event(peer, "refused", f"{peer.name} cannot help: {why}")

    def place(self, peer: Peer, kind: int, fields: dict[str, Any], size: int) -> memoryview | None:
        """See `EventHandler`."""
        client = self._client(fields)
        return None if client is None else client.place(peer.number, kind, fields, size)

    def handle(self, peer: Peer, message: Message) -> None:
        """See `EventHandler`."""
        client = self._client(message.fields)
        if message.kind in (Kind.DONE, Kind.FAILED):
            self._over(peer, client, message)
        elif message.kind == Kind.BYE:
            self._loop.disconnect(peer, str(message.fields.get("why", "")) or "it said goodbye")
        elif client is not None and message.kind == Kind.READY:
            peer.serves((client.service, client.number))
            client.ready(peer.number, message.fields)
            self._feed(peer)
        elif client is not None and message.kind == Kind.REFUSED:
            why = str(message.fields.get("why", ""))
            self.refused(peer, f"{client.service} {client.number}: {why}")
            client.refused(peer.number, why)

    def _over(self, peer: Peer, client: Client | None, message: Message) -> None:
        """A lease was answered, if it was one."""
        if peer.out.pop(_lease(message.fields), None) is not None:
            used = client is not None and client.answered(peer.number, message)
            peer.count(message, used=used)
        self._feed(peer)

    def damaged(self, peer: Peer, problem: LinkError) -> None:
        """See `EventHandler`. If nobody knows which lease it answered, the connection is begun anew."""
        lease = _lease(problem.fields)
        if peer.out.pop(lease, None) is None:
            self._events.event(peer, "damaged", str(problem))
            self._loop.disconnect(peer, str(problem))
            return
        client = self._client(problem.fields)
        if client is not None and client.damaged(peer.number, lease):
            self._events.event(peer, "damaged", f"{problem}; what it carried is made again")
        self._feed(peer)

    def lost(self, peer: Peer, why: str) -> None:
        """See `EventHandler`."""
        if self.closed:
            return
        self._events.event(peer, "lost", f"{peer.name} is lost: {why}; others do its work")
        clients = [client for who in list(peer.ready) if (client := self._find(who))]
        peer.ready.clear()
        for client in clients:
            client.lost(peer.number, why)
        self.feed()

    def failed(self, text: str) -> None:
        """See `EventHandler`."""
        self.say(f"helpers are not used any more, by a fault of Fivefold:\n{text}")

    # ---- leases

    def _open(self, peer: Peer, client: Client) -> None:
        fields = {"service": client.service, "number": client.number, **client.opening()}
        self._loop.send(peer, Kind.OPEN, fields)

    def _feed(self, peer: Peer) -> None:
        while peer.wants and len(peer.out) < OUTSTANDING and self._granted(peer):
            pass

    def _granted(self, peer: Peer) -> bool:
        """Whether a client had a lease for this helper."""
        assert peer.link is not None
        for client in self._in_turn(peer):
            try:
                lease = client.grant(peer.number, peer.link)
            except LinkClosed as problem:
                self._loop.broken(peer, str(problem))
                return False
            if lease is not None:
                who = (client.service, client.number)
                peer.out[lease] = who
                self._turns[who] = next(self._ids)
                return True
        return False

    def _in_turn(self, peer: Peer) -> list[Client]:
        """Clients that this helper serves, in the order in which they are asked."""
        clients = [client for who in list(peer.ready) if (client := self._find(who))]
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

    def _client(self, fields: dict[str, Any]) -> Client | None:
        service, number = fields.get("service"), fields.get("number")
        if isinstance(service, str) and isinstance(number, int):
            return self._find((service, number))
        return None

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether helpers are used no more."""
        return self._loop.closed

    def close(self) -> None:
        """Say goodbye to all helpers: the job of this trainer is done."""
        self._loop.close()


def _lease(fields: dict[str, Any]) -> int:
    """The lease that a message is about; 0, which is none, if it does not say."""
    lease = fields.get("lease")
    return lease if type(lease) is int else 0


_dispatcher: Dispatcher | None = None
_making = threading.Lock()


def _forget() -> None:
    """A forked child has the dispatcher's memory, but not its thread, and the connections are not its own."""
    global _dispatcher, _making
    _dispatcher, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


# ---- What a trainer tells of its helpers: warnings to people, marks and figures to its trace

_EVERY_S = 2.0


class Events:
    """Collects what comes up in any thread, and tells it in the trainer's own.

    There a warning may be an error (`python -W error`) that ends the run, as it should.

    `figures()` gives the state of things.
    """

    def __init__(self, figures: Callable[[], tuple[list[HelperFigures], SupplyFigures]]) -> None:
        self._figures = figures
        self._warnings: deque[str] = deque()
        self._last_s = 0.0
        self._traced: Callable[[], Trace | None] = lambda: None

    def say(self, text: str) -> None:
        """A warning."""
        self._warnings.append(text)

    def event(self, peer: Peer, what: str, text: str, *, warn: bool = True) -> None:
        """Something that happened with a helper: what is "joined", "lost", "retired", "refused", ..."""
        if (trace := active()) is not None:
            trace.note("helper", number=peer.number, name=peer.name, event=what, text=text)
        if warn:
            self.say(text)

    def tell(self, *, now: bool = False) -> None:
        """Warn of what has come up; write figures to the trace if it is time to, or `now`."""
        at_s = time.monotonic()
        if active() is not None and (now or at_s - self._last_s >= _EVERY_S):
            self._last_s = at_s
            self._write()
        while self._warnings:
            warn(self._warnings.popleft(), OffloadWarning)

    def _write(self) -> None:
        trace = active()
        if trace is not None:
            tell(trace, *self._figures())
            if self._traced() is not trace:
                self._traced = weakref.ref(trace)
                # By then the trace is no longer the active one.
                trace.closers.append(lambda: tell(trace, *self._figures()))
