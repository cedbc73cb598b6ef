"""Where processes shall run, as people and programs write it: in options, in a plan, or in a host file.

-H node1:4,node2:4          --helpers local:2,dpu01:4          HOST[:PROCESSES], separated by commas

# a host file: NAME [slots=N] [role=trainer|helper] [cores=LIST] [port=PORT] [python=PATH]
localhost slots=2
dpu01 slots=4 role=helper cores=0-3 port=21001 python=/usr/local/arm/bin/python
# and as others write it
node1 slots=4 max_slots=8     # Open MPI
node2:4                       # MPICH
node3                         # PBS and LSF: a line for each slot
node3
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fivefold.cluster.reading import spans
from fivefold.errors import UsageError, suggest

__all__ = [
    "LOCAL",
    "NAME",
    "Host",
    "Hosts",
    "gathered",
    "parse_helpers",
    "parse_hosts",
    "processes",
    "reachable",
    "read_hostfile",
    "spread",
]

LOCAL = "local"
"""what this node is called"""
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")
"""what a host may be called; no name begins as an option of a remote shell does"""
_MOST_SLOTS = 1024
_DIGITS = re.compile("[0-9]{1,9}")
_KEYS = ("slots", "role", "cores", "port", "python")
_ROLES = ("trainer", "helper")


@dataclass(frozen=True)
class Host:
    """A host, and how many processes of one role it has room for."""

    host: str
    """`LOCAL`, or a name or address that a remote shell knows"""
    slots: int = 1
    """how many processes"""
    cores: tuple[int, ...] = ()
    """logical cores of the host that they share; empty: those that the job was granted, of which helpers of
    this node get one each of the last"""
    port: int = 0
    """TCP port of the first helper; the others take the following ones. 0: chosen by the launcher"""
    python: str = ""
    """its Python, where that has another path than here, as that of another processor may"""
    own: str = field(default="", compare=False)
    """the name that Slurm, PBS or a user has for this node; empty for localhost, and for other nodes"""


@dataclass(frozen=True)
class Hosts:
    """What a host file says."""

    trainers: tuple[Host, ...] = ()
    """each host once, in the order of their first lines"""
    helpers: tuple[Host, ...] = ()
    """line by line"""


def parse_helpers(text: str, where: str = "--helpers") -> tuple[Host, ...]:
    """Read "local:2, dpu01:4". Raises `UsageError` naming the part that is wrong, and `where` it stands."""
    return tuple(_place(name, slots) for name, slots in _parts(text, where))


def parse_hosts(text: str, where: str = "-H") -> tuple[Host, ...]:
    """Read "a:2,b:2,c": each host once, in the order of their first mention; slots add up.

    Raises `UsageError` naming the part that is wrong, and `where` it stands, or if there is none.
    """
    hosts = gathered(_parts(text, where))
    if not hosts:
        raise UsageError(f"{where}: no host is named; expected such as node1:4,node2:4")
    return hosts


def gathered(told: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    """The hosts of names and slots: each once, in the order of their first mention; slots add up."""
    found: dict[str, Host] = {}
    for name, slots in told:
        _add(found, _place(name, slots))
    return tuple(found.values())


def read_hostfile(path: Path) -> Hosts:
    """Read a host file. Raises `UsageError` naming the line that is wrong, or why it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    trainers, helpers = dict[str, Host](), list[Host]()
    for number, line in enumerate(lines, start=1):
        # Open MPI lets blanks stand around the sign.
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host, role = _line(words, where)
        if role == "helper":
            helpers.append(host)
        else:
            _add(trainers, host, where)
    if not trainers and not helpers:
        raise UsageError(f"the host file {path} names no host")
    return Hosts(tuple(trainers.values()), tuple(helpers))


def spread(hosts: Sequence[Host], processes: int | None, per_node: int | None) -> tuple[int, ...]:
    """How many ranks run on each host: the hosts are filled in their order, those after the last rank get 0.

    A host takes as many as it has slots, or `per_node` whatever it has; `processes` None fills all of them.
    Raises `UsageError` if they take fewer.

    >>> hosts = parse_hosts("a:4,b:4,c:4")
    >>> spread(hosts, 6, None), spread(hosts, None, None), spread(hosts, 6, 2)
    ((4, 2, 0), (4, 4, 4), (2, 2, 2))
    """
    assert per_node is None or per_node > 0
    room = [per_node or host.slots for host in hosts]
    left = sum(room) if processes is None else processes
    if sum(room) < left:
        raise UsageError(_too_few(len(hosts), sum(room), left, per_node))
    counts: list[int] = []
    for most in room:
        counts.append(min(most, left))
        left -= counts[-1]
    return tuple(counts)


def _too_few(hosts: int, slots: int, needed: int, per_node: int | None) -> str:
    each = -(-needed // max(1, hosts))
    named = f"{hosts} host{'s' * (hosts != 1)}"
    if per_node is not None:
        return (
            f"--ppn {per_node} on {named} makes {slots} processes, and {needed} are needed: name more hosts, "
            f"or start more on each: --ppn {each}"
        )
    return (
        f"{needed} processes are asked for, and there {'is' if slots == 1 else 'are'} {slots} "
        f"slot{'s' * (slots != 1)} on {named}: name more hosts, give them more slots (slots=N in the host "
        f"file, HOST:N after -H), or start {each} on each: --ppn {each}"
    )


def reachable(host: Host) -> str:
    """What other nodes, and programs that start processes on them, call the host."""
    return host.host if host.host != LOCAL else host.own or socket.gethostname()


def processes(places: Iterable[Host]) -> int:
    """How many processes these are."""
    return sum(place.slots for place in places)


def _parts(text: str, where: str) -> Iterator[tuple[str, int]]:
    for piece in text.split(","):
        if part := " ".join(piece.split()):
            name, slots = _named(part, f"{where} {part}")
            yield name, slots or 1


def _named(text: str, where: str) -> tuple[str, int]:
    """Name and slots of "dpu01:4", 0 where no slots are told."""
    name, colon, slots = text.partition(":")
    if text.startswith("[") or "::" in text:
        raise UsageError(f"{where}: IPv6 addresses cannot be given; write the name of the host")
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{where}: expected HOST:PROCESSES, such as local:2 or dpu01:4; {name!r} is no host name"
        )
    if colon and not (_DIGITS.fullmatch(slots) and 1 <= int(slots) <= _MOST_SLOTS):
        raise UsageError(
            f"{where}: {slots or 'nothing'!r} is no number of processes from 1 to {_MOST_SLOTS}; "
            f"write {name}:2 for two"
        )
    return name, int(slots or 0)


def _place(name: str, slots: int) -> Host:
    """The host of a name: `LOCAL` for this node under any of its own names."""
    own = socket.gethostname()
    if name in (LOCAL, "localhost", "127.0.0.1"):
        return Host(LOCAL, slots)
    # PBS writes node1.site.org where the host calls itself node1, and Slurm the other way round.
    same = name.partition(".")[0] == own.partition(".")[0] and not ("." in name and "." in own)
    return Host(LOCAL, slots, own=name) if same or name == own else Host(name, slots)


def _add(found: dict[str, Host], host: Host, where: str = "") -> None:
    """Add a host, or slots to one that is known. Raises `UsageError` if the two contradict each other."""
    before = found.setdefault(host.host, replace(host, slots=0))
    for key, old, new in (
        ("cores", spans(before.cores), spans(host.cores)),
        ("python", before.python, host.python),
    ):
        if old and new and old != new:
            raise UsageError(
                f"{where}: {key}={new}, but an earlier line of this host says {key}={old}; give one of them"
            )
    found[host.host] = replace(
        before,
        slots=before.slots + host.slots,
        cores=before.cores or host.cores,
        python=before.python or host.python,
        own=before.own or host.own,
    )


def _line(words: list[str], where: str) -> tuple[Host, str]:
    """A line of a host file, and the role it speaks of."""
    name, slots = _named(words[0], where)
    told = {"slots": str(slots)} if slots else {}
    for setting in words[1:]:
        key, _, value = setting.partition("=")
        key = "max_slots" if key == "max-slots" else key
        if not value or key not in (*_KEYS, "max_slots"):
            raise UsageError(f"{where}: {setting!r} is not NAME=VALUE{suggest(key, _KEYS)}")
        if key in told:
            raise UsageError(f"{where}: {key} is given twice")
        told[key] = value
    role = told.get("role", "trainer")
    if role not in _ROLES:
        raise UsageError(f"{where}: there is no role {role!r}{suggest(role, _ROLES)}")
    _number(told, "max_slots", 999_999_999, where)
    slots, port = (
        _number(told, "slots", _MOST_SLOTS, where) or 1,
        _number(told, "port", 65535, where),
    )
    if port and role == "trainer":
        raise UsageError(
            f"{where}: port= is for helpers (role=helper); where ranks meet says --port of the command"
        )
    if port + slots - 1 > 65535:
        raise UsageError(f"{where}: {slots} helpers need ports {port} to {port + slots - 1}")
    cores = _cores(told["cores"], where) if "cores" in told else ()
    python = told.get("python", "")
    return replace(_place(name, slots), cores=cores, port=port, python=python), role


def _number(told: dict[str, str], name: str, most: int, where: str) -> int:
    text = told.get(name)
    if text is None:
        return 0
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise UsageError(f"{where}: {name}={text}: expected a number from 1 to {most}")
    return int(text)


def _cores(text: str, where: str) -> tuple[int, ...]:
    """The cores of "0-3,8"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not _DIGITS.fullmatch(first) or (dash and not _DIGITS.fullmatch(last)):
            raise UsageError(f"{where}: cores={text}: expected numbers such as 0-3,8")
        if dash and not int(first) <= int(last) < int(first) + 4096:
            raise UsageError(f"{where}: cores={text}: {part} is no range")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(cores))
