"""One thread that listens to all helpers, and the calls to those that do not answer.

    calls ── connected ──> bell ─┐
    any thread ── broken ──> bell ┼─ select ─┬─ receive ── handle
    helper 0 ── answer ──────────┤           └─ hang up ── call again
    helper 1 ── answer ──────────┘

Its owner is called under the lock, in this thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.closing import Closing
from fivefold.helpers.calling import Call, Dial
from fivefold.helpers.lines import Line
from fivefold.helpers.messages import Kind, LinkClosed, LinkError, Message

if TYPE_CHECKING:
    from fivefold.helpers.link import Link

__all__ = ["Owner", "Switchboard"]

_POLL_S = 0.002
"""how often links without a file descriptor are asked"""
_IDLE_S = 60.0
_END_S = 10.0


class Owner(Protocol):
    """Who is told what comes over the lines."""

    def connected(self, line: Line) -> None:
        """A helper has answered a call."""
        ...

    def refused(self, line: Line, why: str) -> None:
        """There is no use in calling a helper again."""
        ...

    def place(self, line: Line, kind: Kind, told: dict[str, Any], size: int) -> memoryview | None:
        """Where a payload shall lie. See `Place`."""
        ...

    def handle(self, line: Line, message: Message) -> None:
        """A message has come. May call `hang_up`."""
        ...

    def damaged(self, line: Line, problem: LinkError) -> None:
        """A message was damaged on the way, and dropped. May call `hang_up`."""
        ...

    def lost(self, line: Line, why: str) -> None:
        """The link is closed; called before the line forgets what was out on it."""
        ...

    def failed(self, text: str) -> None:
        """The thread has ended by an error of Fivefold's own."""
        ...


class Switchboard(Closing):
    """Keeps a link on every line, as far as helpers answer. `lock` is held whenever the owner is called."""

    def __init__(
        self, lines: Sequence[Line], key: bytes, dial: Dial, owner: Owner, lock: threading.RLock
    ) -> None:
        self._lines, self._key, self._dial, self._owner = lines, key, dial, owner
        self._lock = lock
        self._closing = threading.Event()
        self._closed = False
        self._connected: deque[tuple[Line, Link]] = deque()
        self._calls: list[Call] = []
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fivefold-desk", daemon=True)
        self._thread.start()
        for line in lines:
            self._call(line)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def send(self, line: Line, kind: Kind, told: dict[str, Any]) -> None:
        """Send a message without a payload, in any thread, with the lock."""
        if line.link is not None:
            try:
                line.link.send(kind, told)
            except LinkClosed as problem:
                self.broken(line, str(problem))

    def broken(self, line: Line, why: str) -> None:
        """Found in any thread, with the lock: a line is dead. This thread hangs up."""
        line.broken = line.broken or why or "the line broke"
        self._ring()

    def hang_up(self, line: Line, why: str) -> None:
        """Close a link, in this thread, with the lock; and call again."""
        link = line.link
        if link is None:
            return
        why = why.removeprefix(f"lost {line.name}: ")
        if link.fileno() >= 0:
            self._selector.unregister(link.fileno())
        link.close()
        self._owner.lost(line, why)
        line.end(why)
        if not self._closing.is_set():
            self._call(line)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except Exception:  # noqa: BLE001 - whatever it is, nobody must wait for helpers any more
            with self._lock:
                self._closing.set()
                self._owner.failed(traceback.format_exc())
                for line in self._lines:
                    self.hang_up(line, "the thread that listens to helpers has failed")

    def _turn(self) -> None:
        polled = [line for line in self._lines if line.link and line.link.fileno() < 0]
        for ready, _ in self._selector.select(_POLL_S if polled else _IDLE_S):
            if ready.fd == self._bell:
                self._answer_bell()
            else:
                self._receive(ready.data)
        for line in polled:
            self._receive(line)

    def _answer_bell(self) -> None:
        os.eventfd_read(self._bell)
        while self._connected:
            line, link = self._connected.popleft()
            with self._lock:
                self._begin(line, link)
        for line in self._lines:
            if line.broken:
                self._receive(line)  # what had come before may say why
                with self._lock:
                    self.hang_up(line, line.broken)

    def _begin(self, line: Line, link: Link) -> None:
        line.begin(link)
        link.place = lambda kind, told, size: self._place(line, kind, told, size)
        if link.fileno() >= 0:
            self._selector.register(link.fileno(), selectors.EVENT_READ, line)
        self._owner.connected(line)

    def _place(self, line: Line, kind: Kind, told: dict[str, Any], size: int) -> memoryview | None:
        with self._lock:
            return self._owner.place(line, kind, told, size)

    def _receive(self, line: Line) -> None:
        link = line.link
        try:
            while link is not None and line.link is link:
                message = link.receive(0.0)
                if message is None:
                    return
                with self._lock:
                    self._owner.handle(line, message)
        except LinkError as problem:
            with self._lock:
                self._owner.damaged(line, problem)
            self._ring_again(line)
        except LinkClosed as problem:
            with self._lock:
                self.hang_up(line, str(problem))

    def _ring_again(self, line: Line) -> None:
        """What has come behind a damaged message may lie in the link already, where no select sees it."""
        if line.link is not None:
            self._receive(line)

    def _call(self, line: Line) -> None:
        self._calls = [call for call in self._calls if call.is_alive()]
        self._calls.append(Call(line, self._key, self._dial, self._answered, self._closing))

    def _answered(self, line: Line, link: Link | None, why: str) -> None:
        """From the thread of a call: it was answered, or there is no use in calling again."""
        if link is None:
            with self._lock:
                self._owner.refused(line, why)
            return
        self._connected.append((line, link))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Say goodbye to all helpers."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        for call in self._calls:
            call.join(_END_S)
        with self._lock:
            for line in self._lines:
                if line.link is not None:
                    self.send(line, Kind.BYE, {"why": "the job has ended"})
                    line.link.close()
                    line.end("", state="ended")
            for _, link in self._connected:
                link.close()
            self._selector.close()
            os.close(self._bell)
