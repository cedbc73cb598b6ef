"""One helper as the dispatcher sees it: its link, leases that are out, and what it has done so far."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from fivefold.helpers.messages import Kind
from fivefold.helpers.versions import differences, versions
from fivefold.trace.helping import HelperFigures, SupplyFigures
from fivefold.wire.frames import Message

if TYPE_CHECKING:
    from fivefold.helpers.link import Link

__all__ = ["OUTSTANDING", "ClientId", "Peer", "SupplyTally"]

OUTSTANDING = 2
"""leases that a helper holds of one trainer: one at work, one queued"""

ClientId = tuple[str, int]
"""service and number"""


class Peer:
    """All that the dispatcher knows of one helper. Its lock guards it."""

    def __init__(self, number: int, address: str) -> None:
        self.number, self.address = number, address
        where = "this node" if address.startswith("unix:") else address
        self.name = f"helper {number} ({where})"
        self.link: Link | None = None
        self.state = "absent"
        """one of `fivefold.trace.helping.STATES`"""
        self.why = ""
        self.broken = ""
        """why the link is dead, before the event loop has closed it"""
        self.ready: set[ClientId] = set()
        """clients that it serves"""
        self.out: dict[int, ClientId] = {}
        """lease -> whose, of leases that are not answered"""
        self.differences: list[str] = []
        """in which versions, or kind of machine, it differs from this process, for people"""
        self._since_s = 0.0
        self._connected_s = 0.0
        self._busy_s = self._waited_s = 0.0
        self._leases = self._evaluated = self._duplicates = self._lost = self._failed = 0
        self._bytes = 0

    @property
    def wants(self) -> bool:
        """Whether it may get leases."""
        return self.state == "serving" and not self.broken

    def begin(self, link: Link) -> None:
        """It has connected."""
        self.link, self.state, self.why, self.broken = link, "serving", "", ""
        self._since_s = time.monotonic()
        theirs = link.hello.get("versions")
        self.differences = (
            differences(versions(), cast("dict[str, str]", theirs))
            if isinstance(theirs, dict)
            else []
        )

    def end(self, why: str, state: str = "lost") -> None:
        """The link is closed; leases that were out are lost."""
        self.link, self.broken = None, ""
        if self.state != "retired":
            self.state, self.why = state, why
        self._connected_s += time.monotonic() - self._since_s
        self._lost += len(self.out)
        self.ready.clear()
        self.out.clear()

    def serves(self, who: ClientId) -> None:
        """It can serve a client."""
        self.ready.add(who)
        if self.state == "refused":
            self.state, self.why = "serving", ""

    def refused(self, why: str) -> None:
        """It cannot serve a client. It may serve others."""
        if not self.ready:
            self.state, self.why = "refused", why

    def count(self, message: Message, *, used: bool) -> None:
        """A lease was answered."""
        fields = message.fields
        self._busy_s += _number(fields.get("busy_s"))
        self._waited_s += _number(fields.get("waited_s"))
        self._bytes += len(message.payload)
        if message.kind == Kind.FAILED:
            self._failed += fields.get("kind") != "Cancelled"
        elif used:
            self._leases += 1
            self._evaluated += fields.get("service") == "validator"
        else:
            self._duplicates += 1

    def figures(self) -> HelperFigures:
        """For the trace."""
        here_s = time.monotonic() - self._since_s if self.link is not None else 0.0
        return HelperFigures(
            number=self.number,
            name=self.name,
            state=self.state,
            why=self.why,
            connected_s=self._connected_s + here_s,
            busy_s=self._busy_s,
            waited_s=self._waited_s,
            leases=self._leases,
            evaluated=self._evaluated,
            duplicates=self._duplicates,
            lost=self._lost,
            failed=self._failed,
            bytes=self._bytes,
        )


class SupplyTally:
    """How the loops of all loaders got their batches, added up: see `SupplyFigures`."""

    def __init__(self) -> None:
        self.own = 0
        self.waited_s = 0.0
        self._batches = self._empty = 0
        self._ready = self._depth = 0

    def asked(self, ready: int, depth: int) -> None:
        """A loop asks for the next batch, `ready` of at most `depth` being there."""
        self._batches += 1
        self._empty += ready == 0
        self._ready += ready
        self._depth += depth

    def figures(self) -> SupplyFigures:
        """For the trace."""
        count = max(self._batches, 1)
        return SupplyFigures(
            batches=self._batches,
            own=self.own,
            empty=self._empty,
            waited_s=self.waited_s,
            occupancy=self._ready / count,
            depth=self._depth / count,
        )


def _number(value: object) -> float:
    """A time that a helper reports, if it makes sense."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0
