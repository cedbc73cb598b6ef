"""The hosts of the allocation that this process runs in, as its resource manager tells them.

    manager   told by                                        for example
    Slurm     SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE       gpu[003-005,010],login1 and 4(x2),3(x3)
    PBS       PBS_NODEFILE                                   a file with a line for each slot
    LSF       LSB_DJOB_HOSTFILE, else LSB_MCPU_HOSTS         such a file, and: host1 4 host2 4
    flux      FLUX_URI, and `flux getattr hostlist`          gpu[003-005]

PBS, LSF and flux were written against their documentation: none has run here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.hosts import Host, gathered, parse_hosts, read_hostfile
from fivefold.launch.slurm import REMEDY, counts, expanded

__all__ = ["allocated"]

Environ = Mapping[str, str]

_ANSWER_S = 10.0


def allocated(environ: Environ = os.environ) -> tuple[Host, ...]:
    """The hosts of the allocation, each once, with as many slots as it has tasks there; empty outside any.

    Of a heterogeneous job of Slurm these are the hosts of its first component. Of flux they are those of the
    instance that `flux alloc` and `flux batch` make, whatever the allocation around it, with a slot each: it
    gives cores, not tasks. There are none for a task that an instance has started, of an instance on one
    host, and where no flux is to be found, as in a container.

    Raises `UsageError` if what is told contradicts itself or cannot be read.
    """
    if environ.get("FLUX_URI"):
        return _flux(environ)
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        return _slurm(environ)
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if path := environ.get(name):
            return _listed(name, path)
    if text := environ.get("LSB_MCPU_HOSTS"):
        return _pairs(text)
    return ()


def _flux(environ: Environ) -> tuple[Host, ...]:
    flux = shutil.which("flux", path=environ.get("PATH", ""))
    if flux is None or environ.get("FLUX_TASK_RANK"):
        return ()
    try:
        asked = subprocess.run(
            [flux, "getattr", "hostlist"],
            env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UsageError(f"flux does not tell its hosts: {problem}; {REMEDY}") from None
    if asked.returncode:
        said = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        raise UsageError(f"flux does not tell its hosts: {said}; {REMEDY}")
    names = expanded(asked.stdout.strip(), "flux hostlist")
    return gathered((name, 1) for name in names) if len(set(names)) > 1 else ()


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
