"""What ranks do while they are recorded: called in the processes of `pool`, or run as a script."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fivefold.comm.tracing import links
from fivefold.comm.tracing_groups import trace_groups
from fivefold.trace import Phase, span
from fivefold.trace.process import start, stop
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import KINDS, PHASES, TAGS

__all__ = [
    "arrivals",
    "consumers",
    "every_operation",
    "hidden_and_exposed",
    "links_of_a_busy_node",
    "of_ddp",
    "use_traced_groups",
    "weights_of_ddp",
    "written_over",
]

_BACKWARD = PHASES.index(Phase.BACKWARD)


def use_traced_groups() -> str:
    """From the next group on."""
    trace_groups()
    dist.barrier()  # a group of gloo's must not end before all have joined it
    return type(dist.distributed_c10d._get_default_group()).__name__


def _recorded(folder: str) -> RankTrace:
    stop()
    return RankTrace.load(Path(folder) / f"rank-{dist.get_rank():05d}.trace")


def every_operation(folder: str) -> dict[str, Any]:
    """Each once; what was recorded, as (kind, bytes, peer), and the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start(Path(folder), {"rank": rank, "size": size})
    x, results = torch.arange(4.0) + rank, []
    dist.all_reduce(x)
    results.append(x.tolist())
    dist.broadcast(x, 1)
    dist.reduce(x.clone(), 0)
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, x)
    results.append([part.tolist() for part in parts])
    whole = torch.empty(4 * size)
    dist.all_gather_into_tensor(whole, x)
    results.append(whole.tolist())
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(x, parts if rank == 0 else None, 0)
    own = torch.empty(2)
    dist.reduce_scatter_tensor(own, torch.ones(2 * size))
    results.append(own.tolist())
    dist.all_to_all_single(whole, torch.arange(4.0 * size) + 100 * rank)
    results.append(whole.tolist())
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif rank == 1:
        dist.recv(x)
        dist.send(x, 0)
    dist.barrier()
    later = dist.all_reduce(torch.ones(3, dtype=torch.float64), async_op=True)
    later.wait()
    dist.all_reduce(torch.ones(3), async_op=True)  # nobody waits, and it does not stay under way
    dist.barrier()
    dist.barrier()
    found = _recorded(folder)
    assert not found.problems, found.problems
    events = [
        (KINDS[event["kind"]], int(event["size_bytes"]), int(event["peer"]), int(event["number"]))
        for event in found.events
    ]
    assert all(event["end_ns"] > 0 for event in found.events)
    fields = (
        "kind",
        "tag",
        "phase",
        "group",
        "dtype",
        "peer",
        "number",
        "step",
        "cpu_ns",
        "size_bytes",
    )
    rows = [tuple(int(event[name]) for name in fields) for event in found.events]
    return {"events": events, "rows": rows, "results": results, "notes": found.notes}


def written_over(folder: str) -> dict[str, Any]:
    """The ring of rank 0 comes round while it waits for the others: what is in it, and what was lost."""
    rank, go = dist.get_rank(), Path(folder) / "go"
    trace = start(Path(folder), {"rank": rank, "size": dist.get_world_size()}, {"events": 64})
    assert trace is not None
    if rank == 0:
        waits = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        waits.start()
        while int(trace.file.events["seq"][0]) != 1:
            time.sleep(0.001)
        for _ in range(64):
            trace.ended(trace.issue(1, 0, 0, 0, 7, 1))
        go.touch()
        waits.join()
    else:
        while not go.exists():
            time.sleep(0.001)
        dist.all_reduce(torch.ones(1))
    found = _recorded(folder)
    return {
        "sizes": [int(size) for size in found.events["size_bytes"]],
        "starts": int((found.events["start_ns"] > 0).sum()), "lost": int(found.live["lost_events"]),
    }  # fmt: skip


def links_of_a_busy_node(times: int, delay_s: float) -> list[dict[str, Any]]:
    """What links are measured to do while rank 1 is late for so many of its long messages."""
    receive, late = dist.recv, iter(range(times))

    def received(tensor: torch.Tensor, **how: Any) -> Any:
        if dist.get_rank() == 1 and tensor.numel() > 2 and next(late, None) is not None:
            time.sleep(delay_s)
        return receive(tensor, **how)

    dist.recv = received
    try:
        return links(dist.group.WORLD, range(dist.get_world_size()))
    finally:
        dist.recv = receive


def arrivals(folder: str) -> list[tuple[str, int, int, int]]:
    """Every rank comes late in turn: to operations that are waited for at once, later, and by a future.

    What was recorded, as (kind, begin, when all had come, end) in nanoseconds.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    start(Path(folder), {"rank": rank, "size": size})
    counts = (0, 1, 20, 21, 4097, 300_001)
    for late in range(size):
        if rank == late:
            time.sleep(0.02)
        for count in counts:
            dist.all_reduce(torch.ones(count))
        dist.broadcast(torch.ones(5), late)
        dist.barrier()
        if rank == late:
            time.sleep(0.02)
        works: list[Any] = [dist.all_reduce(torch.ones(n), async_op=True) for n in counts]
        futures = [works.pop().get_future() for _ in range(2)]
        for future in [*works, *futures]:
            future.wait()
    found = _recorded(folder)
    assert not found.problems, found.problems
    return [
        (KINDS[event["kind"]], *(int(event[name]) for name in ("begin_ns", "start_ns", "end_ns")))
        for event in found.events
    ]


def consumers() -> list[str]:
    """Those that call a group from C++, or by its name; what went wrong."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    wrong: list[str] = []
    reduced = functional.all_reduce(
        torch.ones(2), "sum", dist.distributed_c10d._get_default_group()
    )
    if reduced.tolist() != [size] * 2:
        wrong.append(f"functional collectives: {reduced}")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    fully_shard(net, mesh=mesh)
    net(torch.ones(3, 8)).sum().backward()
    group = dist.new_group(list(range(size)))
    told: list[Any] = [None] * size
    dist.all_gather_object(told, {"rank": dist.get_rank()}, group=group)
    if told != [{"rank": rank} for rank in range(size)]:
        wrong.append(f"objects: {told}")
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        tensors = [torch.ones(n) for n in (2, 3)]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    if [t.sum().item() for t in tensors] != [2.0 * size, 3.0 * size]:
        wrong.append(f"coalesced: {tensors}")
    peer = 1 - dist.get_rank()
    received = torch.zeros(2)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((2,), float(dist.get_rank())), peer),
        dist.P2POp(dist.irecv, received, peer),
    ])  # fmt: skip
    for work in works:
        work.wait()
    if received.tolist() != [peer] * 2:
        wrong.append(f"messages: {received}")
    dist.destroy_process_group(group)
    return wrong


def hidden_and_exposed(folder: str) -> dict[str, int]:
    """An operation that goes on while its caller computes, and is waited for."""
    start(Path(folder), {"rank": dist.get_rank()})
    tensor = torch.ones(1 << 20)
    with span(Phase.BACKWARD):
        time.sleep(0.3 * dist.get_rank())  # this rank comes late
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.1)
        work.wait()
    events = _recorded(folder).events
    (event,) = events[events["kind"] > 0]
    return {"total": int(event["end_ns"] - event["begin_ns"]), "blocked": int(event["blocked_ns"])}


def weights_of_ddp(folder: str | None, steps: int = 4) -> list[float]:
    """Train a small net with DistributedDataParallel; its weights, recorded where `folder` is given."""
    if folder is not None:
        start(Path(folder), {"rank": dist.get_rank(), "size": dist.get_world_size()})
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 8))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        with span(Phase.FORWARD):
            loss = model(torch.randn(16, 64)).square().mean()
        with span(Phase.BACKWARD):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def of_ddp(folder: str) -> dict[str, Any]:
    """How the trace sees gradients that DistributedDataParallel reduces from C++."""
    weights_of_ddp(folder)
    found = _recorded(folder)
    sums = found.sums
    gradients = sums[(sums["phase"] == _BACKWARD) & (sums["kind"] == KINDS.index("all_reduce"))]
    tags = Counter(TAGS[row["tag"]] for row in gradients)
    spans = found.events[(found.events["kind"] == 0) & (found.events["phase"] == _BACKWARD)]
    return {
        "tags": sorted(tags), "count": int(gradients["count"].sum()), "problems": found.problems,
        "total": int(gradients["total_ns"].sum()), "blocked": int(gradients["blocked_ns"].sum()),
        "backward": int((spans["end_ns"] - spans["begin_ns"]).sum()),
        "under_way": int((found.events["end_ns"] == 0).sum()),
    }  # fmt: skip
