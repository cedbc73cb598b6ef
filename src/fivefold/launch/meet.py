"""How the ranks of a job find each other, decided from the environment alone and returned as data.

world of one                                alone   nothing to do
MASTER_ADDR and MASTER_PORT are set         env     torchrun, Fivefold, Kubernetes, a careful script
all ranks on this node                      file    a FileStore keyed by the job: mpirun gives no port
srun over several nodes                     env     first node of the step, a port derived from the step
MPI over several nodes, mpi4py installed    mpi     rank 0 broadcasts its address and a free port
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fivefold.cluster.processes import process_stat
from fivefold.errors import UsageError
from fivefold.launch import slurm
from fivefold.launch.environment import FAMILIES, RankPlace
from fivefold.launch.private import private_folder

__all__ = ["Rendezvous", "meeting"]

Environ = Mapping[str, str]

_REMEDY = (
    "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, in every rank"
)


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet. Every rank of a job computes an equal one.

    alone  nothing else is set.
    env    `address` and `port` of rank 0. Where MASTER_ADDR and MASTER_PORT are set they are equal to
           these, and torch's `env://` may be used (it knows torchrun's own store).
    file   `path` of a file for torch's FileStore, in a folder that only this user can read. The name is
           unique for a running launcher (its process and start time are part of it), but the same for
           two meetings of the same ranks: add a count to it to meet again. Remove the file afterwards.
    mpi    rank 0 broadcasts an address and a port through mpi4py's MPI.COMM_WORLD.
    """

    kind: Literal["alone", "env", "file", "mpi"]
    address: str = ""
    port: int = 0
    path: Path | None = None


def meeting(place: RankPlace, environ: Environ = os.environ) -> Rendezvous:
    """Decide how the ranks of `place` meet.

    Raises `UsageError` if MASTER_ADDR and MASTER_PORT are needed, incomplete or malformed, or if the folder
    for the file cannot be trusted. Creates that folder, nothing else.
    """
    if place.world_size == 1:
        return Rendezvous("alone")
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if address and port:
        return Rendezvous("env", address=address, port=_checked_port(port))
    if address or port:
        given, missing = (
            ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        )
        raise UsageError(f"{given} is set but {missing} is not; {_REMEDY}, or unset {given}")
    if place.launcher == "torchrun":
        raise UsageError(f"RANK and WORLD_SIZE are set but MASTER_ADDR is not; {_REMEDY}")
    if place.local_size == place.world_size:
        folder = Path(tempfile.gettempdir()) / f"fivefold-{os.getuid()}-meet"
        private_folder(folder, "where ranks meet", "or set TMPDIR to a folder of your own")
        return Rendezvous("file", path=folder / f"meet-{_job_key(place, environ)}")
    if place.launcher == "srun" and (host := slurm.first_node(environ)):
        return Rendezvous("env", address=host, port=slurm.meeting_port(environ))
    if find_spec("mpi4py") is not None:
        return Rendezvous("mpi")
    raise UsageError(
        f"{place.world_size} ranks on several nodes, and {place.launcher} does not say where to meet; "
        f"{_REMEDY}, or install mpi4py for the MPI that started them"
    )


def _checked_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT={text}: expected a port number from 1 to 65535")
    return int(text)


def _job_key(place: RankPlace, environ: Environ) -> str:
    """The same in all ranks of the job on this node, different for any two jobs, past ones included."""
    launcher = _launching_process(place, environ)
    if place.job is None and launcher is None:
        raise UsageError(
            f"{place.launcher} gave this job no name and its process cannot be seen from here "
            f"(a container of its own for every rank?); {_REMEDY}"
        )
    boot = _read("/proc/sys/kernel/random/boot_id")
    key = f"{place.launcher} {place.job} {place.world_size} {launcher} {boot.decode()}"
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _launching_process(place: RankPlace, environ: Environ) -> str | None:
    """Pid and start time of the process that started the ranks: the nearest ancestor that is no rank.

    Between it and us there may be shells and wrappers. They carry the rank's variable and the launcher
    (prterun, prted, hydra_pmi_proxy, slurmstepd) does not, under whatever name it runs.
    """
    marks = {f.launcher: f.rank for f in FAMILIES} | {"srun": "SLURM_PROCID"}
    mark = marks[place.launcher].encode()
    value = environ.get(marks[place.launcher], "").encode()
    pid = os.getppid()
    while pid > 0:
        # Another user's process, slurmstepd for one, shows no environment: no wrapper of ours.
        variables = _read(f"/proc/{pid}/environ").split(b"\0")
        found = process_stat(pid)
        if mark + b"=" + value not in variables:
            return f"{pid} {found.began if found else ''}"
        pid = found.parent if found else 0
    return None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
