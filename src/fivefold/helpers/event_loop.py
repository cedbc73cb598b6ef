"""One thread that listens to all helpers, and a dialer for each that does not answer.

    dialer ── connected ──> wakeup ──┐
    any thread ── broken ──> wakeup ─┼─ select ─┬─ receive ── handle
    helper 0 ── answer ──────────────┤          └─ disconnect ── dial again
    helper 1 ── answer ──────────────┘

Its handler is called under the lock, in this thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.closing import Closing
from fivefold.errors import FivefoldError
from fivefold.helpers.messages import Kind
from fivefold.helpers.peers import Peer
from fivefold.wire.frames import LinkClosed, LinkError, Message

if TYPE_CHECKING:
    from fivefold.helpers.link import Link

__all__ = ["Dial", "EventHandler", "EventLoop", "dialled"]

Dial = Callable[[str, bytes, str, float], "Link"]
"""(address, key, name of the helper, timeout in s) to a link"""

_POLL_S = 0.002
"""how often links without a file descriptor are asked"""
_IDLE_S = 60.0
_END_S = 10.0
_ANSWER_S = 5.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0


class EventHandler(Protocol):
    """Who handles what the helpers send."""

    def connected(self, peer: Peer) -> None:
        """A helper has answered a dialer."""
        ...

    def refused(self, peer: Peer, why: str) -> None:
        """There is no use in calling a helper again."""
        ...

    def place(self, peer: Peer, kind: int, fields: dict[str, Any], size: int) -> memoryview | None:
        """Where a payload shall lie. See `Place`."""
        ...

    def handle(self, peer: Peer, message: Message) -> None:
        """A message has come. May call `disconnect`."""
        ...

    def damaged(self, peer: Peer, problem: LinkError) -> None:
        """A message was damaged on the way, and dropped. May call `disconnect`."""
        ...

    def lost(self, peer: Peer, why: str) -> None:
        """The link is closed; called before the peer forgets its leases."""
        ...

    def failed(self, text: str) -> None:
        """The thread has ended by an error of Fivefold's own."""
        ...


class EventLoop(Closing):
    """Keeps a link to every helper that answers. `lock` is held whenever the handler is called."""

    def __init__(
        self,
        peers: Sequence[Peer],
        key: bytes,
        dial: Dial,
        handler: EventHandler,
        lock: threading.RLock,
    ) -> None:
        self._peers, self._key, self._dial, self._handler = peers, key, dial, handler
        self._lock = lock
        self._closing = threading.Event()
        self._closed = False
        self._connected: deque[tuple[Peer, Link]] = deque()
        self._dialers: list[Dialer] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fivefold-dispatcher", daemon=True)
        self._thread.start()
        for peer in peers:
            self._dial_again(peer)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def send(self, peer: Peer, kind: Kind, fields: dict[str, Any]) -> None:
        """Send a message without a payload, in any thread, with the lock."""
        if peer.link is not None:
            try:
                peer.link.send(kind, fields)
            except LinkClosed as problem:
                self.broken(peer, str(problem))

    def broken(self, peer: Peer, why: str) -> None:
        """Found in any thread, with the lock: a link is dead. This thread disconnects."""
        peer.broken = peer.broken or why or "the connection broke"
        self._wake()

    def disconnect(self, peer: Peer, why: str) -> None:
        """Close a link, in this thread, with the lock; and dial again."""
        link = peer.link
        if link is None:
            return
        why = why.removeprefix(f"lost {peer.name}: ")
        if link.fileno() >= 0:
            self._selector.unregister(link.fileno())
        link.close()
        self._handler.lost(peer, why)
        peer.end(why)
        if not self._closing.is_set():
            self._dial_again(peer)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception:  # noqa: BLE001 - whatever it is, nobody must wait for helpers any more
            with self._lock:
                self._closing.set()
                self._handler.failed(traceback.format_exc())
                for peer in self._peers:
                    self.disconnect(peer, "the thread that listens to helpers has failed")

    def _turn(self) -> None:
        polled = [peer for peer in self._peers if peer.link and peer.link.fileno() < 0]
        for ready, _ in self._selector.select(_POLL_S if polled else _IDLE_S):
            if ready.fd == self._wakeup:
                self._woken()
            else:
                self._receive(ready.data)
        for peer in polled:
            self._receive(peer)

    def _woken(self) -> None:
        os.eventfd_read(self._wakeup)
        while self._connected:
            peer, link = self._connected.popleft()
            with self._lock:
                self._begin(peer, link)
        for peer in self._peers:
            if peer.broken:
                self._receive(peer)  # what had come before may say why
                with self._lock:
                    self.disconnect(peer, peer.broken)

    def _begin(self, peer: Peer, link: Link) -> None:
        peer.begin(link)
        link.place = lambda kind, fields, size: self._place(peer, kind, fields, size)
        if link.fileno() >= 0:
            self._selector.register(link.fileno(), selectors.EVENT_READ, peer)
        self._handler.connected(peer)

    def _place(self, peer: Peer, kind: int, fields: dict[str, Any], size: int) -> memoryview | None:
        with self._lock:
            return self._handler.place(peer, kind, fields, size)

    def _receive(self, peer: Peer) -> None:
        link = peer.link
        try:
            while link is not None and peer.link is link:
                message = link.receive(0.0)
                if message is None:
                    return
                with self._lock:
                    self._handler.handle(peer, message)
        except LinkError as problem:
            with self._lock:
                self._handler.damaged(peer, problem)
            self._receive_rest(peer)
        except LinkClosed as problem:
            with self._lock:
                self.disconnect(peer, str(problem))

    def _receive_rest(self, peer: Peer) -> None:
        """What has come behind a damaged message may lie in the link already, where no select sees it."""
        if peer.link is not None:
            self._receive(peer)

    def _dial_again(self, peer: Peer) -> None:
        self._dialers = [dialer for dialer in self._dialers if dialer.is_alive()]
        self._dialers.append(Dialer(peer, self._key, self._dial, self._answered, self._closing))

    def _answered(self, peer: Peer, link: Link | None, why: str) -> None:
        """From a dialer's thread: it was answered, or there is no use in dialling again."""
        if link is None:
            with self._lock:
                self._handler.refused(peer, why)
            return
        self._connected.append((peer, link))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Say goodbye to all helpers."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        for dialer in self._dialers:
            dialer.join(_END_S)
        with self._lock:
            for peer in self._peers:
                if peer.link is not None:
                    self.send(peer, Kind.BYE, {"why": "the job has ended"})
                    peer.link.close()
                    peer.end("", state="ended")
            for _, link in self._connected:
                link.close()
            self._selector.close()
            os.close(self._wakeup)


def dialled(address: str, key: bytes, name: str, timeout_s: float) -> Link:
    """A link to the helper at `address`; imported when needed: it brings sockets and memory."""
    from fivefold.helpers.handshake import connect

    return connect(address, key, name=name, timeout_s=timeout_s)


class Dialer(threading.Thread):
    """A thread that ends when the helper has answered, cannot be of use, or `closing` is set.

    `answered(peer, link, why)` is called once: with a link, or with None and the reason.
    """

    def __init__(
        self,
        peer: Peer,
        key: bytes,
        dial: Dial,
        answered: Callable[[Peer, Link | None, str], None],
        closing: threading.Event,
    ) -> None:
        super().__init__(name=f"fivefold-dial-{peer.number}", daemon=True)
        self._peer, self._key, self._dial = peer, key, dial
        self._answered, self._closing = answered, closing
        self.start()

    def run(self) -> None:
        """Call, with longer and longer pauses."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                link = self._dial(self._peer.address, self._key, self._peer.name, _ANSWER_S)
            except (LinkClosed, OSError):  # not there yet, or too busy to answer
                self._closing.wait(pause_s)
                pause_s = min(pause_s * 1.5, _MOST_PAUSE_S)
            except FivefoldError as problem:
                self._answered(self._peer, None, str(problem))
                return
            else:
                self._answered(self._peer, link, "")
                return
