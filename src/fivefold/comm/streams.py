"""Streams between ranks on different nodes: opened and proved here, used by the C core.

    sender    connect, handshake, group, rank and lane ──►  receiver    gives the socket to that group

Each process takes calls at one socket, and tells its address and key through the store of the ranks. A stream
is opened when something is first sent to a rank; it carries one direction of one group. Large tensors take
several streams at a time where the plan has several (rails), one on each of the interfaces that it names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

from fivefold.arena.native import MESSAGES
from fivefold.cluster.network import address_of
from fivefold.comm import mpi
from fivefold.errors import LaunchError
from fivefold.sections import ALWAYS_DIRECT, Comm
from fivefold.wire import (
    Listener,
    OtherKey,
    OtherProtocol,
    OtherVersion,
    Protocol,
    new_key,
    own_address,
    set_up_tcp,
)
from fivefold.wire.handshake import received

__all__ = [
    "Door",
    "Member",
    "StreamError",
    "configure",
    "direct_bytes",
    "dismiss",
    "door",
    "expect",
    "hang_up",
    "new_token",
    "open_stream",
    "rounds",
]

_PROTOCOL = Protocol("fivefold-comm", "3")
_TOKEN_BYTES = 16
_CALL = struct.Struct(f"<{_TOKEN_BYTES}siii")
"""group, rank of the sender in it, lane, tag of what MPI carries (-1: nothing)"""
_LEFT = struct.pack("<IiQQQQ", 0xFFFFFF02, 0, 0, 0, 0, 0)
"""`struct head` of the core: this rank has left the group"""
_MOST_CALLERS = 256
_RETRY_S = 0.05
_GROUP_S = 60.0
"""how long the sender's rank may be ahead of this one, which has yet to make the group"""


class StreamError(Exception):
    """A stream could not be opened, and why."""


@dataclass(frozen=True)
class Door:
    """Where a process takes calls."""

    hosts: Sequence[str]
    """by rail"""
    port: int
    key: str
    """in hexadecimal digits; whoever is told it through the store may call"""
    world: str = ""
    """of the processes that MPI carries streams between; empty: none"""
    mpi_rank: int = -1


class Member(Interface):
    """A group that streams are opened to."""

    def accept(self, rank: int, lane: int, descriptor: int, tag: int) -> bool:
        """Take a stream of a rank; False if it is not wanted, and still the caller's."""
        ...


def new_token() -> str:
    """A name for a group that no other has."""
    return secrets.token_hex(_TOKEN_BYTES)


_plan = Comm()
_mpi = ("", -1)
_hosts: list[str] = []
"""of the interfaces that the plan names, by rail"""
_UNSENT_BYTES = 256 << 10
"""what the system may hold of one of several streams that is not sent: more would wait for a slow one"""
_LATENCY_S, _MESSAGE_S, _BYTES_PER_S = 30e-6, 6e-6, 1.25e9
"""of Ethernet of 10 Gbit/s: until a message is there, and what the processor does for one"""
_IP_BIND_ADDRESS_NO_PORT = 24
"""see ip(7)"""


def configure(plan: Comm, ranks: int = 1) -> None:
    """Open streams, and take calls, as a plan says, from now on; where this process takes calls stays.

    Collective over the job's `ranks` where MPI is to carry them. Raises `LaunchError` for an interface that
    has no address, and what `comm.mpi.begin` raises.
    """
    global _plan, _hosts, _mpi
    found = {name: address_of(name) for name in plan.interface_names}
    for name in (name for name, address in found.items() if not address):
        there = sorted(one for _, one in socket.if_nameindex() if address_of(one))
        raise LaunchError(
            f"{socket.gethostname()} has no interface {name} with an address (comm.interfaces); those that "
            f"have one: {', '.join(there)}"
        )
    by_mpi = plan.transport == "mpi" and ranks > 1
    met = mpi.begin(ranks, plan.timeout_s) if by_mpi else ("", -1)
    _mpi, _plan, _hosts = met, plan, [*found.values()] * plan.streams


def rounds() -> bool:
    """Whether each node rounds its part of a sum of 16-bit floats, where this process is the first rank."""
    return _plan.partials == "own"


def reads_on_gpu() -> bool:
    """Whether ranks that share a GPU read each other's memory there."""
    return _plan.shared_gpu == "direct"


def direct_bytes(nodes: int) -> int:
    """From how many bytes on small sums over so many nodes are made by doubling, if this is the first rank.

    Straight from each node to each they take a message to each other node, one after the other, and one
    latency; by doubling as many of both as the number of nodes has doublings.

    >>> [direct_bytes(nodes) for nodes in (2, 4, 8, 16, 32)]
    [1048576, 30000, 11250, 2727, 0]
    """
    if _plan.direct_bytes >= 0:
        return _plan.direct_bytes
    rounds = (nodes - 1).bit_length()
    spared = nodes - 1 - rounds
    if spared <= 0:
        return ALWAYS_DIRECT
    return max(0, round(_BYTES_PER_S * ((rounds - 1) * _LATENCY_S / spared - _MESSAGE_S)))


def _listening_socket() -> socket.socket:
    """At a port that is free. Raises `LaunchError` where none is."""
    both, ports = socket.has_dualstack_ipv6(), _plan.port_range
    begin = os.getpid() % len(ports)  # ranks of a node do not all try the same ones first
    for port in [*ports[begin:], *ports[:begin]]:
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if both else socket.AF_INET,
                backlog=socket.SOMAXCONN, dualstack_ipv6=both,
            )  # fmt: skip
    raise LaunchError(
        f"none of the ports {ports[0]} to {ports[-1]} (comm.ports) is free on {socket.gethostname()}: each "
        "rank of a node needs one to take streams of other nodes"
    )


class _Calls:
    """Takes calls for the groups of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[bytes, Member] = {}
        self._left: set[bytes] = set()
        self._process = os.getpid()
        self._taken = taken = _listening_socket()
        key = new_key()
        self._listener = Listener(
            taken, _PROTOCOL, key, self._serve, most=_MOST_CALLERS, of_one=_MOST_CALLERS
        )
        self._port, self._key = int(taken.getsockname()[1]), key.hex()

    @property
    def door(self) -> Door:
        """Where."""
        return Door(_hosts or [own_address()] * _plan.streams, self._port, self._key, *_mpi)

    @property
    def usable(self) -> bool:
        """Whether this is the process that listens, not a forked copy."""
        return self._process == os.getpid()

    def add(self, token: str, group: Member) -> None:
        with self._changed:
            self._groups[bytes.fromhex(token)] = group
            self._changed.notify_all()

    def remove(self, token: str) -> None:
        with self._changed:
            self._groups.pop(bytes.fromhex(token), None)
            self._left.add(bytes.fromhex(token))
            self._changed.notify_all()

    def _serve(self, line: socket.socket) -> None:
        with line:
            try:
                told = received(line, _CALL.size, time.monotonic() + _GROUP_S)
                token, rank, lane, tag = _CALL.unpack(told)
                group = self._group(token)
                if group is None:
                    line.sendall(_LEFT)
                    return
                _prepare(line)
                descriptor = line.detach()
            except OSError:
                return
        if not group.accept(rank, lane, descriptor, tag):
            os.close(descriptor)

    def _group(self, token: bytes) -> Member | None:
        with self._changed:
            self._changed.wait_for(lambda: token in self._groups or token in self._left, _GROUP_S)
            return self._groups.get(token)

    def close(self) -> None:
        """Take no more."""
        self._listener.close()

    def forget(self) -> None:
        """In a forked child: callers would wait for it once the parent has ended."""
        self._taken.close()


_calls: _Calls | None = None
_opening = threading.Lock()


def _forget() -> None:
    if _calls is not None:
        _calls.forget()


os.register_at_fork(after_in_child=_forget)


def _listening() -> _Calls:
    global _calls  # noqa: PLW0603 - one per process
    with _opening:
        if _calls is None or not _calls.usable:
            _calls = _Calls()
        return _calls


def door() -> Door:
    """Where this process takes calls, from now on."""
    return _listening().door


def expect(token: str, group: Member) -> None:
    """Give `group` the streams that are opened to it."""
    _listening().add(token, group)


def hang_up() -> None:
    """At the end of a process that has calls to take no more, but may take long to end."""
    if _calls is not None and _calls.usable:
        _calls.close()


def dismiss(token: str) -> None:
    """Turn away whoever opens a stream to a group from now on."""
    _listening().remove(token)


def open_stream(to: Door, token: str, rank: int, lane: int, tag: int, *, timeout_s: float) -> int:
    """A descriptor of a stream to a group of another process, as its rank `rank`. Raises `StreamError`."""
    end = time.monotonic() + timeout_s
    rail = max(lane - MESSAGES, 0)  # behind messages there are further rails of collectives
    host, own = to.hosts[rail], _hosts[rail] if _hosts else ""
    where = f"{host}:{to.port}" + (f" from {own}, one of comm.interfaces" if own else "")
    call = _CALL.pack(bytes.fromhex(token), rank, lane, tag)
    while True:
        try:
            with _connected((host, to.port), own) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if len(to.hosts) > 1 and lane != MESSAGES:
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
                _PROTOCOL.call(line, bytes.fromhex(to.key), end)
                line.sendall(call)
                _prepare(line)
                return line.detach() or os.dup(0)  # the core takes 0 for a failure
        except OtherKey:
            raise StreamError(
                f"{where} knows another key: it is a process of another job"
            ) from None
        except OtherVersion as other:
            raise StreamError(
                f"{where} speaks version {other}: install one version of Fivefold"
            ) from None
        except OtherProtocol:
            raise StreamError(f"{where} is no process of Fivefold") from None
        except OSError as problem:
            # It hangs up where it has more callers at once than it listens to; whether it has ended, the next
            # call tells.
            hung_up = isinstance(problem, ConnectionError)
            if isinstance(problem, ConnectionRefusedError) or not hung_up or time.monotonic() > end:
                raise StreamError(f"{where}: {problem.strerror or problem}") from problem
            time.sleep(_RETRY_S)


def _connected(to: tuple[str, int], own: str) -> socket.socket:
    """From an address of this host, if one is given."""
    if not own:
        return socket.create_connection(to, _plan.silence_s)
    line = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without it the system takes a port of its own for each stream, wherever that leads.
        line.setsockopt(socket.SOL_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        line.bind((own, 0))
        line.settimeout(_plan.silence_s)
        line.connect(to)
    except BaseException:
        line.close()
        raise
    return line


def _prepare(line: socket.socket) -> None:
    set_up_tcp(line, _plan.silence_s)
    line.setblocking(False)
