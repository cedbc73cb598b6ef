"""What a trainer tells of its helpers: warnings to people, marks and figures to its trace."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable

from fivefold.errors import OffloadWarning, warn
from fivefold.helpers.peers import Peer
from fivefold.trace import active
from fivefold.trace.helping import HelperFigures, SupplyFigures, tell
from fivefold.trace.trace import Trace

__all__ = ["Events"]

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
