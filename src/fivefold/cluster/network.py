"""Network interfaces of a node, and which of them leads where."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import socket
import struct
import threading
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Literal

from fivefold.cluster import reading

__all__ = ["Interface", "address_of", "interface_for", "interfaces", "local_addresses", "resolve"]

_RESOLVER_S = 5.0
_SIOCGIFADDR = 0x8915
"""see netdevice(7)"""

Kind = Literal["ethernet", "infiniband", "loopback", "other"]

# if_arp.h
_KINDS: dict[int, Kind] = {
    1: "ethernet", 32: "infiniband", 772: "loopback",
}  # fmt: skip


@dataclass(frozen=True)
class Interface:
    """One network interface. Bridges, tunnels and the like are `virtual`."""

    name: str
    kind: Kind
    state: str
    """up, down or unknown, as the kernel says; the loopback is always unknown"""
    bytes_per_s: float | None
    """of the link; None where the driver does not tell, as in virtual machines"""
    addresses: tuple[str, ...]
    """IPv4 first"""
    default: bool
    """whether the default route leads through it"""
    virtual: bool
    """no device stands behind it"""
    numa: int | None = None
    """number of the NUMA node that its device is attached to"""

    @property
    def usable(self) -> bool:
        """Whether other nodes might be reached through it."""
        return self.kind != "loopback" and self.state != "down" and bool(self.addresses)


def interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """All interfaces by name."""
    subnets, default = _routes(root)
    local = local_addresses(root)
    six = _addresses_6(root)
    return tuple(
        _interface(
            path, [*_inside(local, subnets.get(path.name, [])), *six.get(path.name, [])], default
        )
        for path in reading.entries(root / "sys/class/net")
        if (path / "type").exists()
    )


def interface_for(found: tuple[Interface, ...], address: str) -> Interface | None:
    """The interface that has this address, else the one of the default route, else None."""
    own = [one for one in found if address and address in one.addresses]
    return next(iter([*own, *(one for one in found if one.default)]), None)


def address_of(interface: str) -> str:
    """An address of an interface of this machine, IPv4 if it has one; empty if it has none, or is not there.

    Asked of the kernel: of two interfaces in one subnet routes do not tell whose an address is.
    """
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        told = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(told[20:24])
    return next(iter(_addresses_6(Path("/")).get(interface, [])), "")


def _interface(path: Path, addresses: list[str], default: str) -> Interface:
    kind: Kind = _KINDS.get(reading.number(path / "type") or 0, "other")
    speed = reading.number(path / "speed")
    if kind == "loopback" and not any("." in one for one in addresses):
        addresses = ["127.0.0.1", *addresses]  # routes of the loopback are not in /proc/net/route
    return Interface(
        name=path.name,
        kind=kind,
        state=reading.text(path / "operstate") or "unknown",
        bytes_per_s=speed * 125e3 if speed and speed > 0 else None,  # told in Mbit/s
        addresses=tuple(addresses),
        default=path.name == default,
        virtual=not (path / "device").exists(),
        numa=reading.numa(path / "device"),
    )


def _routes(root: Path) -> tuple[dict[str, list[IPv4Network]], str]:
    """Subnets behind each interface, and the interface of the default route, from /proc/net/route."""
    subnets: dict[str, list[IPv4Network]] = {}
    default = ""
    for line in (reading.text(root / "proc/net/route") or "").splitlines()[1:]:
        name, target, gateway, *_, mask, _, _, _ = line.split()
        if int(target, 16) == 0:
            default = default or name
        elif int(gateway, 16) == 0:
            subnets.setdefault(name, []).append(IPv4Network(f"{_four(target)}/{_four(mask)}"))
    return subnets, default


def _four(digits: str) -> IPv4Address:
    """An address as /proc/net/route writes it: a number in the order of this machine's bytes."""
    return IPv4Address(struct.pack("=I", int(digits, 16)))


def local_addresses(root: Path = Path("/")) -> list[IPv4Address]:
    """All IPv4 addresses of the node: the leaves `/32 host LOCAL` of the kernel's routing trie."""
    lines = (reading.text(root / "proc/net/fib_trie") or "").splitlines()
    found: list[IPv4Address] = []
    for above, line in itertools.pairwise(lines):
        if line.strip() == "/32 host LOCAL":
            address = IPv4Address(above.split()[-1])
            if address not in found:
                found.append(address)
    return found


def _inside(addresses: list[IPv4Address], subnets: list[IPv4Network]) -> list[str]:
    return [str(one) for one in addresses if any(one in subnet for subnet in subnets)]


def _addresses_6(root: Path) -> dict[str, list[str]]:
    """IPv6 addresses by interface, those of the link alone left out."""
    found: dict[str, list[str]] = {}
    for line in (reading.text(root / "proc/net/if_inet6") or "").splitlines():
        digits, *_, name = line.split()
        address = IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def resolve(host: str, root: Path = Path("/")) -> str:
    """The IPv4 address that `host` stands for on this node; empty if there is none.

    /etc/hosts comes first, as with nearly every resolver; then, on this machine itself, the resolver.
    """
    for line in (reading.text(root / "etc/hosts") or "").splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if host in names and "." in address:
            return address
    if root != Path("/"):
        return ""
    return _asked(host)


def _asked(host: str) -> str:
    """What the resolver says, if it does so in time: one without a server takes half a minute to give up."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(host))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVER_S)
    return found[0] if found else ""
