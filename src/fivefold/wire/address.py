"""Where this host can be reached by other nodes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import psutil

from fivefold.errors import LaunchError

__all__ = ["addresses_of", "own_address"]


def own_address() -> str:
    """The address of this host that the other nodes reach it by: the interface toward rank 0, if known."""
    toward = os.environ.get("MASTER_ADDR", "")
    if toward in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    # Connecting a datagram socket sends nothing; it only chooses the interface.
    for target in filter(None, (toward, "192.0.2.1")):  # the second is reserved (RFC 5737)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards,
        ):
            outwards.connect((target, 9))
            return str(outwards.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def addresses_of(interfaces: Sequence[str]) -> list[str]:
    """The address of each of these network interfaces of this host.

    Raises `LaunchError` for one that it does not have, or that has no address.
    """
    there, host = psutil.net_if_addrs(), socket.gethostname()
    if missing := [name for name in interfaces if name not in there]:
        raise LaunchError(
            f"{host} has no interface {missing[0]} (comm.interfaces); it has {', '.join(sorted(there))}"
        )
    found = [_reachable([(one.family, one.address) for one in there[name]]) for name in interfaces]
    for name, address in zip(interfaces, found, strict=True):
        if not address:
            raise LaunchError(f"interface {name} of {host} (comm.interfaces) has no address")
    return found


def _reachable(addresses: Sequence[tuple[int, str]]) -> str:
    """The first one that other hosts can use, by family: IPv4, or IPv6 beyond the link."""
    four = [told for family, told in addresses if family == socket.AF_INET]
    six = [told for family, told in addresses if family == socket.AF_INET6]
    return next(iter([*four, *(told for told in six if not told.startswith("fe80"))]), "")
