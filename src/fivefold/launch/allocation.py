"""The hosts of the allocation that this process runs in, as its resource manager tells them.

    manager   told by                                        for example
    Slurm     SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE       gpu[003-005,010],login1 and 4(x2),3(x3)
    PBS       PBS_NODEFILE                                   a file with a line for each slot
    LSF       LSB_DJOB_HOSTFILE, else LSB_MCPU_HOSTS         such a file, and: host1 4 host2 4
    flux      its own command, see `flux_hosts`              node[0-3] 64

PBS, LSF and flux were written against their documentation: none of them has run here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.hosts import NAME, Host, gathered, parse_hosts, read_hostfile

__all__ = ["allocated", "counts", "expanded", "flux_hosts"]

Environ = Mapping[str, str]

_MOST_HOSTS = 65_536
_REMEDY = "name the hosts yourself, by -H or --hostfile"
# A name may hold several brackets: rack[1-2]node[07-09].site.org
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_FLUX = re.compile(r"(\S+)\s+([0-9]{1,9})")
_COUNT = re.compile(r"([1-9][0-9]{0,4})(?:\(x([1-9][0-9]{0,4})\))?")


def allocated(environ: Environ = os.environ) -> tuple[Host, ...]:
    """The hosts of the allocation, each once, with as many slots as it has tasks there; empty outside any.

    Of a heterogeneous job of Slurm these are the hosts of its first component. Of flux none are told here,
    nor are those of an allocation that a flux instance fills: it gives its jobs parts of it.

    Raises `UsageError` if what is told contradicts itself or cannot be read.
    """
    if environ.get("FLUX_URI"):
        return ()
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        return _slurm(environ)
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if path := environ.get(name):
            return _listed(name, path)
    if text := environ.get("LSB_MCPU_HOSTS"):
        return _pairs(text)
    return ()


def expanded(text: str, name: str) -> tuple[str, ...]:
    """The hosts of a list as Slurm and flux write it; `name` says what lists them.

    Raises `UsageError` if that is no list, or if it has more than 65,536 hosts.

    >>> expanded("gpu[009-010],rack[1-2]n[7,9].org", "SLURM_JOB_NODELIST")
    ('gpu009', 'gpu010', 'rack1n7.org', 'rack1n9.org', 'rack2n7.org', 'rack2n9.org')
    """
    items = _ITEM.findall(text)
    if not text or ",".join(items) != text:
        raise _unreadable(name, text)
    hosts: list[str] = []
    for item in items:
        begun = [""]
        for number, piece in enumerate(_BRACKET.split(item)):
            # What stands in brackets comes at every second place.
            ends = _numbers(piece, name, text) if number % 2 else [piece]
            if len(hosts) + len(begun) * len(ends) > _MOST_HOSTS:
                raise _too_many(name)
            begun = [begin + end for begin in begun for end in ends]
        hosts += begun
    if not all(map(NAME.fullmatch, hosts)):
        raise _unreadable(name, text)
    return tuple(hosts)


def counts(text: str, name: str) -> tuple[int, ...]:
    """The tasks of each node from Slurm's shorthand, the value of the variable `name`.

    Raises `UsageError` if it is something else.

    >>> counts("4(x2),3", "SLURM_TASKS_PER_NODE")
    (4, 4, 3)
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match or len(found) + int(match[2] or 1) > _MOST_HOSTS:
            raise UsageError(f"cannot read {name}={text}: expected such as 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def flux_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of a flux instance, with as many slots as cores, from what this command prints:

        flux resource list -s free,allocated -n -o "{nodelist} {ncores}"

    That is one line, or several whose slots add up: hosts, and how many cores they have together. Written
    against the documentation of flux-core, and tried on outputs made after it only.

    Raises `UsageError` if that is something else, or if the hosts do not have equally many cores.

    >>> [(host.host, host.slots) for host in flux_hosts("n[0-1] 8")]
    [('n0', 4), ('n1', 4)]
    """
    told: list[tuple[str, int]] = []
    for line in map(str.strip, text.splitlines()):
        if line in ("", "0"):
            continue  # no host is in this state
        match = _FLUX.fullmatch(line)
        if not match:
            raise UsageError(f"flux told {line!r}, which is not such as node[0-3] 64; {_REMEDY}")
        names, cores = expanded(match[1], "flux resource list"), int(match[2])
        each, rest = divmod(cores, len(names))
        if rest or not each:
            raise UsageError(
                f"flux tells that {match[1]} have {cores} cores together, which cannot be equally many on "
                f"each; {_REMEDY}"
            )
        told += [(name, each) for name in names]
    return gathered(told)


def _slurm(environ: Environ) -> tuple[Host, ...]:
    nodes, tasks = environ["SLURM_JOB_NODELIST"], environ.get("SLURM_TASKS_PER_NODE", "")
    names = expanded(nodes, "SLURM_JOB_NODELIST")
    if tasks:
        slots = counts(tasks, "SLURM_TASKS_PER_NODE")
    else:
        each = environ.get("SLURM_NTASKS_PER_NODE") or "1"
        slots = counts(each, "SLURM_NTASKS_PER_NODE")[:1] * len(names)
    if len(slots) != len(names):
        raise UsageError(
            f"SLURM_JOB_NODELIST={nodes} and SLURM_TASKS_PER_NODE={tasks} contradict each other: "
            f"{len(names)} and {len(slots)} nodes; {_REMEDY}"
        )
    return gathered(zip(names, slots, strict=True))


def _listed(name: str, path: str) -> tuple[Host, ...]:
    """The hosts of the file that the variable `name` names."""
    try:
        return read_hostfile(Path(path)).trainers
    except UsageError as problem:
        raise UsageError(f"{name}: {problem}; {_REMEDY}") from None


def _pairs(text: str) -> tuple[Host, ...]:
    words = text.split()
    if not words or len(words) % 2 or "," in text:
        raise UsageError(f"cannot read LSB_MCPU_HOSTS={text}: expected such as host1 4 host2 4")
    pairs = zip(words[::2], words[1::2], strict=True)
    return parse_hosts(",".join(f"{name}:{slots}" for name, slots in pairs), "LSB_MCPU_HOSTS")


def _numbers(text: str, name: str, whole: str) -> list[str]:
    """What the brackets around "003-005,010" stand for."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _unreadable(name, whole)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"cannot read {name}={whole}: {part} goes backwards; {_REMEDY}")
        if len(found) + last - first >= _MOST_HOSTS:
            raise _too_many(name)
        # The first number tells how many digits all have: 008-010, but 8-10.
        found += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return found


def _unreadable(name: str, text: str) -> UsageError:
    return UsageError(
        f"cannot read {name}={text}: expected such as gpu[003-005,010],login1; {_REMEDY}"
    )


def _too_many(name: str) -> UsageError:
    return UsageError(f"{name} names more than {_MOST_HOSTS:,} hosts; {_REMEDY}")
