"""What the kernel counts of TCP connections to other nodes: how fast links are while they are in use.

    bytes     that the other side has acknowledged
    busy      time in which something was sent and not yet acknowledged
    kept      of it, time in which the other side had no room: its process did not read

Nothing is sent for it. Connections within a node do not count. Linux from 4.10 on tells this (`tcp_info`, see
include/uapi/linux/tcp.h); elsewhere, and for fabrics that are not TCP, there are no figures.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.trace.trace import Trace
    from fivefold.trace.windows import Row

__all__ = ["AddressTotals", "Connections", "peers"]

_ACKED_AT, _BUSY_AT, _BYTES = 120, 168, 192
_EVERY_NS = 10_000_000_000
_LEAST_BYTES = 1 << 16
"""that were sent to a peer, before it is worth a line"""
_MOST = 16
"""peers of a note: those that were sent to for longest"""


@dataclass
class AddressTotals:
    """All connections to one address, added up since they were made."""

    to: str
    bytes: int = 0
    busy_s: float = 0.0
    kept_s: float = 0.0


def peers() -> tuple[list[str], list[AddressTotals]]:
    """Addresses of this node, and whom its process sends to on other nodes."""
    own: set[str] = set()
    found: dict[str, AddressTotals] = {}
    for connection in _sockets():
        with contextlib.suppress(OSError):
            here, there = (
                _plain(name[0]) for name in (connection.getsockname(), connection.getpeername())
            )
            if _is_within(here, there):
                continue
            own.add(here)
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
            if len(told) < _BYTES:
                continue
            (acked,) = struct.unpack_from("<Q", told, _ACKED_AT)
            busy_us, kept_us = struct.unpack_from("<QQ", told, _BUSY_AT)
            peer = found.setdefault(there, AddressTotals(there))
            peer.bytes, peer.busy_s = peer.bytes + acked, peer.busy_s + busy_us / 1e6
            peer.kept_s += kept_us / 1e6
    return sorted(own), [peer for peer in found.values() if peer.bytes >= _LEAST_BYTES]


def _is_within(here: str, there: str) -> bool:
    """Whether both ends are on this node."""
    return here == there or there.startswith("127.") or there == "::1"


def _plain(address: str) -> str:
    """One spelling of an address: gloo writes those of version 4 as ones of version 6."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=number)
        except OSError:  # closed meanwhile
            continue
        try:
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
            ):
                yield found
        finally:
            found.detach()  # it is not ours


class Connections:
    """A sampler of a `Trace`: notes of kind "links" after steps 1, 2, 4, 8, ... and at the end."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next_step, self._next_ns = 1, 0
        self._latest: dict[str, object] = {}
        trace.samplers.append(self)
        trace.closers.append(self.close)

    def __call__(self, row: Row) -> None:  # noqa: ARG002 - as samplers are called
        """Look, if it is time."""
        step, now = self._trace.step, time.monotonic_ns()
        due = step >= self._next_step
        if not due and now < self._next_ns:
            return
        self._next_ns = now + _EVERY_NS
        own, found = peers()
        if not found:
            self._latest = {}
        else:
            longest = sorted(found, key=lambda peer: -peer.busy_s)[:_MOST]
            self._latest = {"step": step, "own": own, "peers": [asdict(peer) for peer in longest]}
        if due:
            self._next_step = max(2 * self._next_step, step + 1)
            self._note()

    def close(self) -> None:
        """Note what was seen last; nothing is looked at any more."""
        self._note()
        self._trace.samplers.remove(self)

    def _note(self) -> None:
        latest, self._latest = self._latest, {}
        if latest:
            self._trace.note("links", **latest)
