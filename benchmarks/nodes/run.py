"""Collectives between nodes: the backend fivefold, gloo, MPI, and bare sockets that move the same bytes.

    python benchmarks/nodes/run.py [--parts slow,fast,pairs] [--rounds 7]

Nodes are namespaces of the kernel with an interface each, whose rate `tc tbf` limits. In one job, with groups
of both backends and a bare connection, the contenders take turns at each operation and size. MPI has jobs of
its own, as `fivefold bench` starts them; the contenders take turns there too, and the idle ones are blocked.
Where MPI carries what goes between nodes, two ranks of this machine take each other for nodes: it carries
through memory, which stands for a network that it drives better than the kernel does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from contender import BenchmarkError
from figures import environment
from parts import ALONE, BY_MPI, KIB, MPI_ALONE, ONE, OWN, PARTS, REDUCER, Part
from publishing import Page
from rounds import order
from tables import crossing, section

HERE = Path(__file__).resolve().parent
WORK_S = 0.15
"""about as long as a contender is timed in a round"""
PORT = 29400
BATCH, EDGE = 4, 64
"""images of a rank, and pixels of their edge"""


# ---- on the nodes


class Sockets:
    """The bound: a bare connection between the first ranks of two nodes, both of which send and receive."""

    def __init__(self, rank: int, address: str, first: int) -> None:
        if rank == 0:
            with socket.create_server((address, PORT)) as door:
                self.line = door.accept()[0]
        elif rank == first:
            self.line = _connected(address)
        self.takes_part = rank in {0, first}
        if self.takes_part:
            self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, sent: memoryview, received: memoryview) -> None:
        """Both at once."""
        if not self.takes_part:
            return
        sending = (
            threading.Thread(target=self.line.sendall, args=(sent,))
            if len(sent) > 64 * KIB
            else None
        )
        if sending is None:
            self.line.sendall(sent)
        else:
            sending.start()
        left = received
        while left:
            left = left[self.line.recv_into(left) :]
        if sending is not None:
            sending.join()


class MpiAlone:
    """The bound where MPI carries: its own operations, on the same memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def call(
        self, operation: str, whole: torch.Tensor, other: torch.Tensor
    ) -> Callable[[], object]:
        """What it does once."""
        here, there = whole.numpy(), other.numpy()
        return {
            "all_reduce": lambda: self._world.Allreduce(self._in_place, here),
            "all_to_all": lambda: self._world.Alltoall(here, there),
            "broadcast": lambda: self._world.Bcast(here),
        }[operation]


def _connected(address: str) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _named(name: str, older: str) -> Callable[..., object]:
    """Of torch.distributed; 2.13 has new names, and warns of those that 2.11 has."""
    return vars(dist).get(name, vars(dist)[older])


def calls(
    operation: str,
    size_bytes: int,
    groups: Mapping[str, Any],
    bare: Sockets | MpiAlone,
    dtype: torch.dtype,
) -> dict[str, Callable[[], object]]:
    """What each contender does once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    least = size if operation != "all_reduce" else 1
    count = max(size_bytes // dtype.itemsize // size * size, least)
    whole, part, other = (torch.ones(n, dtype=dtype) for n in (count, max(count // size, 1), count))
    found: dict[str, Callable[[], object]] = {}
    for name, group in groups.items():
        by_operation: dict[str, Callable[[], object]] = {
            "all_reduce": functools.partial(dist.all_reduce, whole, group=group),
            "broadcast": functools.partial(dist.broadcast, whole, 0, group=group),
            "all_gather": functools.partial(
                _named("all_gather_single", "all_gather_into_tensor"), whole, part, group=group
            ),
            "reduce_scatter": functools.partial(
                _named("reduce_scatter_single", "reduce_scatter_tensor"),
                part,
                whole,
                group=group,
            ),
            "all_to_all": functools.partial(dist.all_to_all_single, other, whole, group=group),
        }
        found[name] = by_operation[operation]
    if isinstance(bare, MpiAlone):
        found[MPI_ALONE] = bare.call(operation, whole, other)
        return found
    sent, received = crossing(operation, dtype.itemsize * count, rank, size // 2)
    room = memoryview(bytearray(max(sent, received, 4)))
    into = memoryview(bytearray(max(sent, received, 4)))
    found["sockets"] = functools.partial(bare.move, room[: max(sent, 4)], into[: max(received, 4)])
    return found


def steps(name: str, groups: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    """A step of training over each group, one of Fivefold's own reducer, and one that exchanges nothing."""
    import fivefold
    from fivefold.plan import Parallel, Plan
    from fivefold.recipes import models

    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(BATCH, 3, EDGE, EDGE), torch.randint(10, (BATCH,))
    found: dict[str, Callable[[], object]] = {}
    for group_name, group in groups.items():
        net = DistributedDataParallel(models.build(name, 10), process_group=group)
        optim = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(net: Any = net, optim: Any = optim) -> None:
            optim.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optim.step()

        def alone(net: Any = net, step: Callable[[], None] = step) -> None:
            with net.no_sync():
                step()

        step()
        found[group_name] = step
        found.setdefault(ALONE, alone)
    plan = Plan(parallel=Parallel(batch_norm="replica"))  # as DistributedDataParallel has it
    mesh = fivefold.start(plan, device="cpu")
    model = fivefold.parallelize(models.build(name, 10), mesh, loss=nn.CrossEntropyLoss())
    model_optim = torch.optim.SGD(model.parameters(), lr=0.01)

    def own() -> None:
        model_optim.zero_grad()
        model.step(images, labels)
        model_optim.step()

    found[REDUCER] = own
    return found


def joined(part: Part, out: Path) -> tuple[dict[str, Any], Sockets | MpiAlone]:
    """Meet the other ranks: groups by contender, and the bound."""
    import fivefold.comm
    from fivefold.comm import meeting
    from fivefold.comm.streams import configure
    from fivefold.sections import Comm

    named = [f"eth{n}" for n in range(part.interfaces)] if part.interfaces > 1 else []
    several = Comm(interfaces=",".join(named))

    def group_with(comm: Comm) -> Any:
        configure(comm, dist.get_world_size())
        made = dist.new_group(backend=fivefold.comm.BACKEND)
        configure(several)  # streams are opened as the latest says
        return made

    configure(several)
    if part.mpi:
        bound: Sockets | MpiAlone = MpiAlone()
        rank, size = bound.rank, bound.size
        meeting.node_name = lambda: f"node {rank}"
        store: dist.Store = dist.FileStore(str(out / "store"), size)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group(fivefold.comm.BACKEND, store=store, rank=rank, world_size=size)
    groups = {"fivefold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if named:
        groups[ONE] = group_with(Comm(interfaces=named[0]))
    if getattr(torch, part.dtype).itemsize == 2:
        groups[OWN] = group_with(Comm(partials="own"))
    if part.mpi:
        groups[BY_MPI] = group_with(Comm(transport="mpi"))
        return groups, bound
    return groups, Sockets(rank, address, part.ranks_per_node)


def worker(part: Part, rounds: int, out: Path) -> None:
    """One rank: seconds of each call, by operation, size, contender and round."""
    groups, bound = joined(part, out)
    dtype = getattr(torch, part.dtype)
    found: dict[str, list[float]] = {}

    def measure(what: str, contenders: Mapping[str, Callable[[], object]], times: int = 0) -> None:
        """In turns; `times` of 0: as often as time allows."""
        often = {name: times or _repeats(call, groups["gloo"]) for name, call in contenders.items()}
        for number in range(rounds):
            for name in order([*contenders], number):
                seconds = _timed(contenders[name], often[name], groups["gloo"])
                found.setdefault(f"{what} {name}", []).append(seconds)

    for net in part.nets:
        measure(net, steps(net, groups), 2)
    for operation, size_bytes in (
        () if part.nets else itertools.product(part.operations, part.sizes)
    ):
        measure(f"{operation} {size_bytes}", calls(operation, size_bytes, groups, bound, dtype))
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _timed(call: Callable[[], object], times: int, group: Any) -> float:
    dist.barrier(group)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def _repeats(call: Callable[[], object], group: Any) -> int:
    """How often it is called in a round; the same on all ranks."""
    _timed(call, 2, group)
    once = torch.tensor([_timed(call, 2, group)])
    dist.broadcast(once, 0, group)
    return max(2, min(300, round(WORK_S / float(once))))


# ---- around them


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Nodes, a job on them, and what its first rank found."""
    from faults import slow_link
    from nodes import Nodes, refusal

    if why := refusal():
        raise BenchmarkError(f"this machine makes no nodes: {why}")
    part = PARTS[name]
    if part.against:
        return compared(name, rounds)
    if part.mpi:
        return carried(name, rounds)
    burst = max(128 * KIB, int(part.gbit_per_s * 1e9 / 8 / 1000 * 1.5))
    there = environment()
    with Nodes(2, interfaces=part.interfaces) as nodes:
        for node, number in itertools.product(range(2), range(part.interfaces)):
            slow_link(
                nodes, node, 1000 * part.gbit_per_s, burst=str(burst), latency="50ms",
                interface=f"eth{number}",
            )  # fmt: skip
        words = [sys.executable, str(HERE / "run.py"), "--worker", name, "--rounds", str(rounds)]
        job = nodes.job([*words, "--out", str(nodes.shared)], ranks_per_node=part.ranks_per_node)
        codes = job.wait(part.limit_s)
        if any(codes):
            said = "\n".join(rank.text[-1500:] for rank in job.ranks)
            raise BenchmarkError(f"ranks ended with {codes}: {said}")
        found = json.loads((nodes.shared / "found.json").read_text())
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return {"benchmark": "nodes", "part": name, "rounds": rounds, "found": found,
            "environment": {**there, **more}}  # fmt: skip


def compared(name: str, rounds: int) -> dict[str, Any]:
    """What `fivefold bench` finds, called beside the nodes: by operation, as its --json has it."""
    from faults import slow_link
    from login_site import Site

    part, found = PARTS[name], dict[str, Any]()
    ranks = part.nodes * part.ranks_per_node
    there = environment()
    with tempfile.TemporaryDirectory() as told, Site(part.nodes, Path(told)) as site:
        for node in range(part.nodes):
            slow_link(site.nodes, node, 1000 * part.gbit_per_s, burst="192000", latency="50ms")
        hosts = ",".join(f"{site.name(node)}:{part.ranks_per_node}" for node in range(part.nodes))
        out = Path(told) / "bench.json"
        for operation in part.operations:
            words = [
                sys.executable, "-m", "fivefold", "bench", operation, "-n", str(ranks), "-H", hosts,
                "--engine", "ssh", "--sizes", ":".join(map(str, part.sizes)), "--rounds", str(rounds),
                "--against", ",".join(part.against), "--json", str(out),
            ]  # fmt: skip
            # UCX would take the first interface that it finds, and the nodes for one, as they share a kernel.
            environ = site.environ | {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self"}
            done = subprocess.run(
                [*site.entering(Path(told)), *words], env=environ, capture_output=True, text=True,
                timeout=part.limit_s, check=False,
            )  # fmt: skip
            if done.returncode:
                raise BenchmarkError(f"{operation}: {(done.stdout + done.stderr)[-1500:]}")
            found[operation] = json.loads(out.read_text())["results"]
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return {"benchmark": "nodes", "part": name, "rounds": rounds, "found": found,
            "environment": {**there, **more}}  # fmt: skip


def carried(name: str, rounds: int) -> dict[str, Any]:
    """What the first of two ranks of this machine found, which an MPI has started."""
    import mpis

    part, there = PARTS[name], environment()
    mpirun = mpis.find(part.mpi)
    words = [sys.executable, str(HERE / "run.py"), "--worker", name, "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as told:
        done = subprocess.run(
            [mpirun, *mpis.options(part.mpi), "-n", "2", *words, "--out", told],
            env=os.environ | mpis.library(part.mpi) | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=part.limit_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchmarkError(f"{name}: {(done.stdout + done.stderr)[-1500:]}")
        found = json.loads((Path(told) / "found.json").read_text())
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return {"benchmark": "nodes", "part": name, "rounds": rounds, "found": found,
            "environment": {**there, **more}}  # fmt: skip


PAGE = Page(HERE, section, tuple(name for name in PARTS if not name.startswith("tiny")))


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PAGE.order))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=PAGE.home / "results")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.worker is not None:
        worker(PARTS[told.worker], told.rounds, told.out)
        return 0
    parts = told.parts.split(",")
    if strange := [word for word in parts if word not in PARTS]:
        parser.error(f"there is no {strange[0]}; valid: {', '.join(PARTS)}")
    return PAGE.publish(parts, lambda name: measured(name, told.rounds), told.results)


if __name__ == "__main__":
    sys.exit(main())
