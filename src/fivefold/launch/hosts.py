"""Where helpers shall run, as people write it: on the command line, in a plan, or in a host file.

--helpers local:2,dpu01:4                      HOST[:PROCESSES], separated by commas or given again

# hosts.txt: NAME [slots=N] [role=trainer|helper] [cores=LIST] [port=PORT] [python=PATH]
localhost slots=2
dpu01 slots=4 role=helper cores=0-3 port=21001 python=/usr/local/arm/bin/python
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UsageError, suggest

__all__ = ["LOCAL", "HelperHost", "Hosts", "parse_helpers", "processes", "read_hostfile"]

LOCAL = "local"
"""what this node is called"""
_MOST_SLOTS = 1024
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")
_KEYS = ("slots", "role", "cores", "port", "python")
_ROLES = ("trainer", "helper")


@dataclass(frozen=True)
class HelperHost:
    """Some helpers on one host."""

    host: str
    """`LOCAL`, or a name or address that a remote shell knows"""
    slots: int = 1
    """how many processes"""
    cores: tuple[int, ...] = ()
    """logical cores of the host that they share; empty: one each of this node's last, any of another's"""
    port: int = 0
    """TCP port of the first; the others take the following ones. 0: chosen by the launcher"""
    python: str = ""
    """its Python, where that has another path than here, as that of another processor may"""


@dataclass(frozen=True)
class Hosts:
    """What a host file says."""

    trainers: int = 0
    """slots of this node; 0: nothing is said of it"""
    helpers: tuple[HelperHost, ...] = ()


def parse_helpers(text: str, where: str = "--helpers") -> tuple[HelperHost, ...]:
    """Read "local:2, dpu01:4". Raises `UsageError` naming the part that is wrong, and `where` it stands."""
    places: list[HelperHost] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        host, colon, slots = part.partition(":")
        if not _NAME.fullmatch(host):
            raise UsageError(f"{where} {part}: expected HOST:PROCESSES, such as local:2 or dpu01:4")
        if colon and not (slots.isdecimal() and 1 <= int(slots) <= _MOST_SLOTS):
            raise UsageError(
                f"{where} {part}: {slots or 'nothing'!r} is no number of processes from 1 to {_MOST_SLOTS}; "
                f"write {host}:2 for two"
            )
        places.append(HelperHost(_called(host), int(slots) if colon else 1))
    return tuple(places)


def read_hostfile(path: Path) -> Hosts:
    """Read a host file. Raises `UsageError` naming the line that is wrong, or why it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    trainers, helpers = 0, list[HelperHost]()
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place, role = _line(words, f"{path}, line {number}")
        if role == "helper":
            helpers.append(place)
        else:
            trainers += _trainers(place, f"{path}, line {number}")
    return Hosts(trainers, tuple(helpers))


def _line(words: list[str], where: str) -> tuple[HelperHost, str]:
    host, *settings = words
    if not _NAME.fullmatch(host):
        raise UsageError(f"{where}: {host!r} is no host name")
    told: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name not in _KEYS or not equals or not value:
            raise UsageError(f"{where}: {setting!r} is not NAME=VALUE{suggest(name, _KEYS)}")
        if name in told:
            raise UsageError(f"{where}: {name} is given twice")
        told[name] = value
    role = told.get("role", "trainer")
    if role not in _ROLES:
        raise UsageError(f"{where}: there is no role {role!r}{suggest(role, _ROLES)}")
    slots = _number(told, "slots", _MOST_SLOTS, where) or 1
    port = _number(told, "port", 65535, where)
    if port + slots - 1 > 65535:
        raise UsageError(f"{where}: {slots} helpers need ports {port} to {port + slots - 1}")
    cores = _cores(told.get("cores", ""), where)
    return HelperHost(_called(host), slots, cores, port, told.get("python", "")), role


def _trainers(place: HelperHost, where: str) -> int:
    if place.host != LOCAL:
        raise UsageError(
            f"{where}: {place.host} is another host, and fivefold run starts trainers on this node only: "
            "start the script there with srun or mpirun, or add role=helper"
        )
    return place.slots


def _number(told: dict[str, str], name: str, most: int, where: str) -> int:
    text = told.get(name)
    if text is None:
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise UsageError(f"{where}: {name}={text}: expected a number from 1 to {most}")
    return int(text)


def _cores(text: str, where: str) -> tuple[int, ...]:
    """The cores of "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{where}: cores={text}: expected numbers such as 0-3,8")
        if dash and not int(first) <= int(last) < int(first) + 4096:
            raise UsageError(f"{where}: cores={text}: {part} is no range")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(cores))


def _called(host: str) -> str:
    """The host's name, `LOCAL` for this node under any of its own names."""
    own = socket.gethostname()
    return LOCAL if host in {LOCAL, "localhost", "127.0.0.1", own, own.partition(".")[0]} else host


def processes(places: Iterable[HelperHost]) -> int:
    """How many helpers these are."""
    return sum(place.slots for place in places)
