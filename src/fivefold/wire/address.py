"""Where this host can be reached by other nodes."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

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
    there, host = [name for _, name in socket.if_nameindex()], socket.gethostname()
    if missing := [name for name in interfaces if name not in there]:
        raise LaunchError(
            f"{host} has no interface {missing[0]} (comm.interfaces); it has {', '.join(sorted(there))}"
        )
    found = [_ipv4_of(name) or _ipv6_of(name) for name in interfaces]
    for name, address in zip(interfaces, found, strict=True):
        if not address:
            raise LaunchError(f"interface {name} of {host} (comm.interfaces) has no address")
    return found


_SIOCGIFADDR = 0x8915
"""see netdevice(7)"""


def _ipv4_of(interface: str) -> str:
    asked = struct.pack("256s", interface.encode())
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)[20:24])
    return ""


def _ipv6_of(interface: str) -> str:
    """One that leads beyond the link."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""
