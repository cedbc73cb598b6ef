"""The store through which the ranks of a job find each other, reachable for no more hosts than need be.

all ranks on this node     a file, or a port of 127.0.0.1
several nodes              a port of the one address of rank 0 that the others were told
torchrun holds a store     that one, as torchrun has made it

A store asks nobody who they are: whoever reaches it may read and write. What Fivefold tells through it is
therefore nothing but names: of hosts, cores, GPUs and sockets, and where in its program a rank stands.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from fivefold.errors import UsageError
from fivefold.launch.environment import RankPlace
from fivefold.launch.meet import Rendezvous
from fivefold.torch_private import without_warnings_of_sockets

__all__ = ["open_store"]

_log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_NAME_MPI = (
    "set MPI4PY_LIBMPI to the library of that mpirun (libmpi.so.12 of MPICH, libmpi.so.40 of Open MPI), or "
    "MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there, in every rank"
)


def open_store(where: Rendezvous, place: RankPlace, timeout: timedelta) -> dist.Store:
    """The store at `where`; rank 0 holds it open. Collective.

    Raises `OSError` or `RuntimeError` if it cannot be opened, or ranks do not come in `timeout`,
    `UsageError` if MPI should tell where it is and cannot.
    """
    if where.kind == "file":
        return dist.FileStore(str(where.path), place.world_size)
    if where.kind == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with without_warnings_of_sockets():
            found = dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout)
            return next(iter(found))[0]
    first = place.rank == 0
    listener: socket.socket | None = None
    if where.kind == "mpi":
        listener, address, port = _told_by_mpi(place.world_size)
    else:
        address, port = where.address, where.port
        if place.local_size == place.world_size:
            address = _LOOPBACK
        if first:
            listener = _listening(address, port)
            # To this host its own name may mean an address at which nobody listens.
            address = listener.getsockname()[0] if listener else _LOOPBACK
    # Several of one process at one port share a server: a script may start torch.distributed by itself later.
    with without_warnings_of_sockets():
        return dist.TCPStore(
            address, port, place.world_size, first, timeout, multi_tenant=True,
            master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip


def _listening(name: str, port: int) -> socket.socket | None:
    """A socket that listens at the address of this host that `name` means elsewhere; None without one."""
    for family, _, _, _, found in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        address = str(found[0])
        if name != _LOOPBACK and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue  # a host may call itself 127.0.1.1
        try:
            return socket.create_server(found[:2], family=family, backlog=socket.SOMAXCONN)
        except OSError as problem:
            if problem.errno != errno.EADDRNOTAVAIL:
                raise
    _log.warning(
        "MASTER_ADDR=%s is no address of this host (%s), where rank 0 runs: the store in which ranks meet "
        "listens on all interfaces; set MASTER_ADDR to the address by which other nodes reach it",
        name, socket.gethostname(),
    )  # fmt: skip
    return None


def _told_by_mpi(ranks: int) -> tuple[socket.socket | None, str, int]:
    """Where rank 0 listens, told to the others by MPI itself; the socket is rank 0's.

    Raises `UsageError` if mpi4py finds no MPI library, or another one than that of the launcher.
    """
    try:
        from mpi4py import MPI  # starts MPI, so only where MPI started us
    except (ImportError, RuntimeError) as problem:
        tried = "; ".join(line.strip() for line in str(problem).splitlines())
        raise UsageError(
            f"ranks on several nodes meet through mpi4py, which did not load MPI: {tried}; {_NAME_MPI}"
        ) from problem
    if (size := MPI.COMM_WORLD.Get_size()) != ranks:
        library = MPI.Get_library_version().split("\n")[0].strip().rstrip("\0,")
        raise UsageError(
            f"ranks on several nodes meet through mpi4py, which loaded another MPI than that of the mpirun "
            f"that started them: {library} knows {size} of {ranks} ranks; {_NAME_MPI}"
        )
    listener = None
    if MPI.COMM_WORLD.Get_rank() == 0:
        listener = socket.create_server((_own_address(), 0), backlog=socket.SOMAXCONN)
    address, port = MPI.COMM_WORLD.bcast(listener.getsockname() if listener else ("", 0), root=0)
    return listener, address, port


def _own_address() -> str:
    """An address of this host that other nodes can use: many hosts call themselves 127.0.1.1."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(name)
        if not found.startswith("127."):
            return found
    # Connecting a datagram socket sends nothing; it only chooses the interface that leads outwards.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:
        outwards.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return str(outwards.getsockname()[0])
    return name
