"""From whatever launched us to a mesh.

environment --locate--> Place --meeting--> Meeting --store--> torch.distributed --> DeviceMesh --> Mesh
(RANK, PMI_RANK, ...)   (rank of size)     (where to meet)
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
import re
import socket
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fivefold.comm import BACKEND, mpi, register, streams
from fivefold.comm.cuda_memory import uuid_of
from fivefold.comm.store import all_differ
from fivefold.comm.tracing import trace_folder
from fivefold.comm.tracing_groups import trace_groups
from fivefold.errors import FivefoldError, LaunchError, PlanError
from fivefold.launch.environment import RankPlace, locate
from fivefold.launch.meet import Rendezvous, meeting
from fivefold.launch.progress import own_progress
from fivefold.launch.role import is_helper
from fivefold.launch.variables import check_variables, read_seconds
from fivefold.mesh.groups import named_mesh
from fivefold.mesh.heap import keep_memory
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.overlap import warn_of_turns
from fivefold.mesh.recording import record
from fivefold.plan import AXES, Layout, Plan, Provenance, check_instances
from fivefold.torch_private import note_version, spin, without_warnings_of_sockets

__all__ = ["start"]


def start(
    plan: Plan | None = None, *, device: str | torch.device | None = None, traced: bool = False
) -> Mesh:
    """Join the processes that were started with this one, and lay `plan.layout` over them.

    Works alone (one process), under `fivefold run`, torchrun, Open MPI's mpirun, MPICH's mpiexec, srun,
    Cray PALS and flux. Without a plan, the one that `fivefold run --plan` named is used, else the default;
    a layout that nobody chose puts every process on the `data` axis. `device` defaults to this rank's GPU
    where there is one, else the CPU. A torch.distributed that runs already is used as it is. `traced`: make
    groups whose operations a trace sees; where FIVEFOLD_TRACE is set they are, and the trace begins here.
    A helper (FIVEFOLD_ROLE) meets nobody: it gets a mesh of one process on the CPU, whatever the plan says.

    Raises:
        PlanError: the layout does not fit the number of processes.
        UsageError: the environment of the launcher contradicts itself, srun was forgotten, or a variable of
            ours, such as `FIVEFOLD_PLAN`, does not exist or cannot be what it is.
        LaunchError: the processes did not meet.
    """
    if is_helper():
        return _mesh_of_helper(plan or _told_plan())
    check_variables(os.environ)
    own_progress().alive()
    adopted = dist.is_initialized()
    place = _adopted_place() if adopted else locate()
    plan = _timed(_fitted(plan or _told_plan(), place.world_size))
    where = _device(place, device, plan.instances.per_device)
    if place.rank == 0:
        note_version()
    if where.type == "cpu":
        keep_memory()
    if traced or trace_folder() is not None:
        trace_groups()
    if not adopted:
        _join(place, plan, where)
    names = named_mesh(where, plan.layout, plan.comm.timeout_s)
    mesh = Mesh(plan, plan.layout, place.rank, place.world_size, where, names, not adopted)
    if (folder := trace_folder()) is not None:
        record(mesh, folder, place)
    return mesh


def _mesh_of_helper(plan: Plan) -> Mesh:
    """A world of one, so that the script gets as far as a trainer would before it trains."""
    adopted = dist.is_initialized()
    if adopted and dist.get_world_size() > 1:
        raise LaunchError(
            f"this helper is one of {dist.get_world_size()} processes of torch.distributed, but helpers stay "
            "outside it: leave it to ff.start() to start torch.distributed"
        )
    keep_memory()
    if not adopted:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told = {key: why for key, why in plan.provenance.items() if not key.startswith("layout.")}
    plan = replace(plan, layout=Layout(), provenance=told)
    cpu = torch.device("cpu")
    names = named_mesh(cpu, plan.layout, plan.comm.timeout_s)
    return Mesh(plan, plan.layout, 0, 1, cpu, names, not adopted, role="helper")


def _told_plan() -> Plan:
    path = os.environ.get("FIVEFOLD_PLAN")
    return Plan.load(path) if path else Plan()


def _timed(plan: Plan) -> Plan:
    seconds = read_seconds("FIVEFOLD_TIMEOUT_S", plan.comm.timeout_s)
    if seconds == plan.comm.timeout_s:
        return plan
    return plan.replace({"comm.timeout_s": seconds}, Provenance("user", "FIVEFOLD_TIMEOUT_S"))


def _fitted(plan: Plan, processes: int) -> Plan:
    check_instances(plan, processes)
    if plan.layout.size == processes:
        return plan
    if plan.layout == Layout() and plan.origin("layout.data").kind == "default":
        return replace(plan, layout=Layout(data=processes))
    asked = " x ".join(
        f"{axis}={n}" for axis, n in zip(AXES, plan.layout.sizes, strict=True) if n > 1
    )
    needs = plan.layout.size
    raise PlanError(
        f"the layout {asked or 'data=1'} ({plan.origin('layout.data')}) needs {needs} "
        f"process{'es' if needs > 1 else ''}, but {processes} "
        f"{'were' if processes > 1 else 'was'} started: start {needs} (fivefold run -n {needs} ...), "
        f"or choose axes ({', '.join(AXES)}) whose sizes multiply to {processes}"
    )


def _adopted_place() -> RankPlace:
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % local_size))
    return RankPlace(rank, size, local_rank, local_size, "running")


def _device(place: RankPlace, asked: str | torch.device | None, per_device: int) -> torch.device:
    if asked is not None:
        return torch.device(asked)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # More ranks than GPUs share them in turn, or as neighbours where the plan says so; they then talk over
    # gloo, since NCCL refuses that.
    own = torch.device("cuda", place.local_rank // per_device % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def _backend(
    place: RankPlace, plan: Plan, device: torch.device, store: dist.Store, timeout: timedelta
) -> str:
    if plan.comm.backend != "auto":
        return plan.comm.backend
    if device.type != "cuda":
        return BACKEND if place.world_size > 1 else "gloo"
    own = uuid_of(device)
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        own = "MIG"  # NCCL takes no slices
    # Counting visible GPUs would not tell: with `--gpus-per-task` every rank sees one, its own.
    alone = all_differ(
        dist.PrefixStore("gpus", store), place.rank, place.world_size, own,
        timeout=timeout, what="naming their GPUs",
    )  # fmt: skip
    return "cpu:gloo,cuda:nccl" if alone else "gloo"


def _note_other_nodes(place: RankPlace, plan: Plan) -> None:
    """One line where `comm.direct_bytes` was measured on another number of nodes than the job has."""
    why, nodes = plan.origin("comm.direct_bytes"), place.world_size // place.local_size
    measured = re.search(r"on (\d+) nodes", why.reason) if why.kind == "tuned" else None
    if measured and int(measured[1]) != nodes and place.rank == 0:
        _log.warning(
            "comm.direct_bytes = %d was measured %s, and this job has %d: measure again with fivefold bench "
            "allreduce --tune, or leave it out",
            plan.comm.direct_bytes, measured[0], nodes,
        )  # fmt: skip


def _join(place: RankPlace, plan: Plan, device: torch.device) -> None:
    register()
    _note_other_nodes(place, plan)
    streams.configure(plan.comm, place.world_size)
    timeout = timedelta(seconds=plan.comm.timeout_s)
    try:
        store = _store(place, timeout)
        dist.init_process_group(
            _backend(place, plan, device, store, timeout),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        if device.type == "cuda" and (each := plan.instances.per_device) > 1:
            own = dist.PrefixStore(f"overlap-{place.rank // each}", store)
            warn_of_turns(own, place.rank % each, each, partial(spin, device), timeout)
    except (RuntimeError, ValueError, OSError) as problem:
        if isinstance(problem, FivefoldError):
            raise
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} ({place.launcher}) could not meet the others: "
            f"{str(problem).strip().splitlines()[0]}"
        ) from problem


_met: dist.Store | None = None
"""Where this process met the others. Kept: the address, or the file, serves for one meeting only."""
_meetings = itertools.count()


def _store(place: RankPlace, timeout: timedelta) -> dist.Store:
    """What the ranks exchange addresses through; every start sees a store of its own."""
    global _met  # noqa: PLW0603 - one job, one place to meet
    if place.world_size == 1:
        return dist.HashStore()
    if _met is None:
        _met = open_store(meeting(place), place, timeout)
    return dist.PrefixStore(f"start-{next(_meetings)}", _met)


# ---- The store through which the ranks of a job find each other, reachable for no more hosts than need be
#
# all ranks on this node     a file, or a port of 127.0.0.1
# several nodes              a port of the one address of rank 0 that the others were told
# torchrun holds a store     that one, as torchrun has made it
#
# A store asks nobody who they are: whoever reaches it may read and write. What Fivefold tells through it is
# therefore nothing but names: of hosts, cores, GPUs and sockets, and where in its program a rank stands.

_log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_NAME_MPI = (
    f"{mpi.NAME_MPI}, or MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there, in every "
    "rank"
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
    world = mpi.loaded(ranks, "ranks on several nodes meet", _NAME_MPI).COMM_WORLD
    listener = None
    if world.Get_rank() == 0:
        listener = socket.create_server((_own_address(), 0), backlog=socket.SOMAXCONN)
    address, port = world.bcast(listener.getsockname() if listener else ("", 0), root=0)
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
