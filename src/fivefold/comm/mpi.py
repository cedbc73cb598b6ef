"""MPI as the carrier of streams between nodes: found through mpi4py, used by the C core.

All processes of MPI_COMM_WORLD take part, once; ranks of groups know each other by their ranks there.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import time
from types import ModuleType

from fivefold.arena.native import MpiFunctions, core
from fivefold.errors import LaunchError, UsageError

__all__ = ["NAME_MPI", "begin", "loaded"]

_log = logging.getLogger(__name__)
NAME_MPI = "set MPI4PY_LIBMPI to the library of that mpirun (libmpi.so.12 of MPICH, libmpi.so.40 of Open MPI)"
_FINISH_S = 60.0
"""how long what was sent may wait for its receiver when this process ends"""


def loaded(ranks: int, what: str, remedy: str) -> ModuleType:
    """mpi4py's module of MPI, which starts it. Raises `UsageError` if it knows another number of ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        tried = "; ".join(line.strip() for line in str(problem).splitlines())
        raise UsageError(
            f"{what} through mpi4py, which did not load MPI: {tried}; {remedy}"
        ) from problem
    if (size := MPI.COMM_WORLD.Get_size()) != ranks:
        library = MPI.Get_library_version().split("\n")[0].strip().rstrip("\0,")
        raise UsageError(
            f"{what} through mpi4py, which loaded another MPI than that of the mpirun that started them: "
            f"{library} knows {size} of {ranks} ranks; {remedy}"
        )
    return MPI


_begun: list[tuple[str, int]] = []


def begin(ranks: int, timeout_s: float) -> tuple[str, int]:
    """Let MPI carry streams of this process: a name of all that do so together, and its rank there.

    Collective, the first time, over the processes that MPI started, which are the job's `ranks`. Raises
    `UsageError` without mpi4py, with an MPI that takes calls of one thread only, or where the ranks were not
    started by MPI; `LaunchError` if some of them do not come within `timeout_s`.
    """
    if _begun:
        return _begun[0]
    found = loaded(
        ranks,
        'with comm.transport = "mpi" ranks talk',
        "start them with the mpirun of that MPI, or with srun --mpi=pmix; if it did, "
        f"{NAME_MPI}; pip install fivefold[mpi] brings both",
    )
    if found.Query_thread() < found.THREAD_MULTIPLE:
        raise UsageError(
            'comm.transport = "mpi" needs an MPI that any thread may call (MPI_THREAD_MULTIPLE), and it '
            "was started without: leave mpi4py.rc.thread_level as it is, or use an MPI built with threads"
        )
    world, request = found.COMM_WORLD.Idup()
    end = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > end:
            raise LaunchError(
                f"some of the {ranks} processes that MPI started have not begun to use it after "
                f'{timeout_s:g} s: comm.transport = "mpi" has to be in the plan of each'
            )
        time.sleep(0.001)
    world.Set_errhandler(found.ERRORS_RETURN)
    name = str(world.bcast(secrets.token_hex(8)))
    library = ctypes.CDLL(found.__file__)
    functions = [
        ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p)
        for name in ("Isend", "Irecv", "Test", "Get_count", "Cancel")
    ]
    # Handles are pointers, or ints, which mpi4py gives without their signs.
    core().ff_mpi_use(
        MpiFunctions(
            *functions,
            *(found._handleof(handle) % (1 << 64) for handle in (world, found.BYTE)),  # noqa: SLF001
            found._sizeof(found.Comm) == ctypes.sizeof(ctypes.c_void_p),  # noqa: SLF001
            world.Get_attr(found.TAG_UB),
        )
    )
    atexit.register(_finish, os.getpid())
    _begun.append((name, int(world.Get_rank())))
    return _begun[0]


def _finish(process: int) -> None:
    """Before MPI is finalized, as mpi4py does after this."""
    if process != os.getpid():
        return
    if left := core().ff_mpi_finish(_FINISH_S):
        _log.warning("%d streams still wait for their receivers, which take nothing", left)
