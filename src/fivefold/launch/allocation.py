"""The hosts of the allocation that this process runs in, as its resource manager tells them.

    manager   told by                                        for example
    Slurm     SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE       gpu[003-005,010],login1 and 4(x2),3(x3)
    PBS       PBS_NODEFILE                                   a file with a line for each slot
    LSF       LSB_DJOB_HOSTFILE, else LSB_MCPU_HOSTS         such a file, and: host1 4 host2 4

PBS and LSF were written against their documentation: neither has run here. Flux
tells nothing in variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.hosts import Host, gathered, parse_hosts, read_hostfile
from fivefold.launch.slurm import REMEDY, counts, expanded

__all__ = ["allocated"]

Environ = Mapping[str, str]


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
            f"{len(names)} and {len(slots)} nodes; {REMEDY}"
        )
    return gathered(zip(names, slots, strict=True))


def _listed(name: str, path: str) -> tuple[Host, ...]:
    """The hosts of the file that the variable `name` names."""
    try:
        return read_hostfile(Path(path)).trainers
    except UsageError as problem:
        raise UsageError(f"{name}: {problem}; {REMEDY}") from None


def _pairs(text: str) -> tuple[Host, ...]:
    words = text.split()
    if not words or len(words) % 2 or "," in text:
        raise UsageError(f"cannot read LSB_MCPU_HOSTS={text}: expected such as host1 4 host2 4")
    pairs = zip(words[::2], words[1::2], strict=True)
    return parse_hosts(",".join(f"{name}:{slots}" for name, slots in pairs), "LSB_MCPU_HOSTS")
