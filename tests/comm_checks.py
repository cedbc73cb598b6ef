"""What ranks of the tests of communication do. Each runs within a default group."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from fivefold.comm import add_in_order, streams
from fivefold.sections import Comm

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


EVERY_DTYPE = (
    "float32", "float64", "bfloat16", "float16", "int64", "uint8", "int32", "bool", "complex64",
)  # fmt: skip
# torch 2.13 renamed both.
_all_gather_single: Any = vars(dist).get("all_gather_single", vars(dist)["all_gather_into_tensor"])
_reduce_scatter_single: Any = vars(dist).get(
    "reduce_scatter_single", vars(dist)["reduce_scatter_tensor"]
)


def raw(tensor: Tensor) -> bytes:
    """The bits of a tensor."""
    # One number alone is contiguous whatever its stride, which a view of bytes is not indifferent to.
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    return own.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def suits(name: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return name == "sum"
    if dtype.is_floating_point:
        return name in ("sum", "avg", "prod", "min", "max")
    return name not in ("avg", "prod") if dtype == torch.bool else name != "avg"


def mine(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that all sums and products are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 3 + 1).reshape(shape).to(dtype)


def done(work: Any) -> None:
    if work is not None:
        work.wait()


class _Operations:
    """Each method starts one operation with fresh tensors and gives its results."""

    def __init__(self, dtype: torch.dtype, count: int, later: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.last, self.later, self.count = self.size - 1, later, count
        self.own = mine(self.rank, (count,), dtype)
        self.whole = mine(self.rank, (self.size * count,), dtype)

    def many(self) -> list[Tensor]:
        return [torch.zeros_like(self.own) for _ in range(self.size)]

    def all_reduce(self, op: Any = dist.ReduceOp.SUM) -> list[Tensor]:
        tensor = self.own.clone()
        done(dist.all_reduce(tensor, op=op, async_op=self.later))
        return [tensor]

    def reduce(self) -> list[Tensor]:
        tensor = self.own.clone()
        done(dist.reduce(tensor, self.last, async_op=self.later))
        return [tensor] if self.rank == self.last else []

    def broadcast(self) -> list[Tensor]:
        tensor = self.own.clone()
        done(dist.broadcast(tensor, self.last, async_op=self.later))
        return [tensor]

    def all_gather(self) -> list[Tensor]:
        tensors = self.many()
        done(dist.all_gather(tensors, self.own, async_op=self.later))
        return tensors

    def all_gather_single(self) -> list[Tensor]:
        output = torch.zeros_like(self.whole)
        done(_all_gather_single(output, self.own, async_op=self.later))
        return [output]

    def gather(self) -> list[Tensor]:
        tensors = self.many() if self.rank == self.last else None
        done(dist.gather(self.own, tensors, self.last, async_op=self.later))
        return tensors or []

    def scatter(self) -> list[Tensor]:
        output = torch.zeros_like(self.own)
        parts = [part.clone() for part in self.whole.view(self.size, self.count).unbind()]
        given = parts if self.rank == self.last else None
        done(dist.scatter(output, given, self.last, async_op=self.later))
        return [output]

    def reduce_scatter(self) -> list[Tensor]:
        output = torch.zeros_like(self.own)
        parts = list(self.whole.view(self.size, self.count).unbind())
        done(dist.reduce_scatter(output, parts, async_op=self.later))
        return [output]

    def reduce_scatter_single(self) -> list[Tensor]:
        output = torch.zeros_like(self.own)
        done(_reduce_scatter_single(output, self.whole, async_op=self.later))
        return [output]

    def all_to_all_single(self) -> list[Tensor]:
        output = torch.zeros_like(self.whole)
        done(dist.all_to_all_single(output, self.whole, async_op=self.later))
        return [output]

    def all_to_all_uneven(self) -> list[Tensor]:
        sends = [self.count + q for q in range(self.size)]
        takes = [self.count + self.rank] * self.size
        tensor = mine(self.rank, (sum(sends), 2), self.own.dtype)
        output = torch.zeros(sum(takes), 2, dtype=self.own.dtype)
        done(dist.all_to_all_single(output, tensor, takes, sends, async_op=self.later))
        return [output]

    def coalesced(self) -> list[Tensor]:
        tensors = [self.own.clone(), self.whole.clone()]
        with _coalescing_manager(async_ops=self.later) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if self.later:
            manager.wait()
        return tensors


def every_operation(dtype_name: str, count: int, later: bool) -> dict[str, list[bytes] | str]:
    """The results of all operations, by name; the error where one is not offered."""
    dtype = getattr(torch, dtype_name)
    all_ = _Operations(dtype, count, later)
    moving = (all_.broadcast, all_.all_gather, all_.all_gather_single, all_.gather, all_.scatter,
              all_.all_to_all_single, all_.all_to_all_uneven)  # fmt: skip
    adding = (all_.reduce, all_.reduce_scatter, all_.reduce_scatter_single, all_.coalesced)
    runs = {run.__name__: run for run in (moving if dtype == torch.bool else moving + adding)}
    for name, op in REDUCTIONS.items():
        if suits(name, dtype):
            runs[f"all_reduce {name}"] = functools.partial(all_.all_reduce, op)
    found: dict[str, list[bytes] | str] = {}
    for name, run in runs.items():
        try:
            found[name] = [raw(tensor) for tensor in run()]
        except (RuntimeError, ValueError, TypeError) as problem:
            found[name] = f"{type(problem).__name__}: {problem}"
    return found


def assert_same(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], dtype: str
) -> None:
    """Whether all ranks got from `every_operation` what they get over gloo, where that offers it."""
    for rank, found in enumerate(ours):
        for name, result in found.items():
            assert isinstance(result, list), f"{name} on rank {rank}: {result}"
            expected = theirs[rank][name]
            if dtype == "bool":  # gloo adds them as numbers: true + true is 2
                expected = [bytes(map(bool, bits)) for bits in expected]
            if isinstance(expected, list):
                assert result == expected, f"{name} on rank {rank} of {len(ours)}"


def through_copies(dtype_name: str, count: int, later: bool) -> dict[str, list[bytes] | str]:
    """`every_operation`, and messages, as on GPUs that ranks share: no tensor is reached where it is."""
    from fivefold.comm import operations, tensors

    def reached(_: Tensor) -> bool:
        return False

    known = tensors.is_reached
    tensors.is_reached = operations.is_reached = reached
    try:
        found = every_operation(dtype_name, count, later)
        sent, come = mine(dist.get_rank(), (count,), torch.float32), torch.zeros(count)
        other, size = dist.get_rank() ^ 1, dist.get_world_size()
        if other < size:
            works = [dist.irecv(come, other), dist.isend(sent, other)]
            for work in works:
                work.wait()
            assert torch.equal(come, mine(other, (count,), torch.float32))
        under_another_default()
        return found
    finally:
        tensors.is_reached = operations.is_reached = known


def under_another_default() -> None:
    """What is computed does not depend on where a script has new tensors made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, part = torch.full((size, 3), rank + 1.0), torch.zeros(3)
    gathered = [torch.zeros(3) for _ in range(size)]
    with torch.device("meta"):
        dist.all_gather(gathered, own[rank])
        _reduce_scatter_single(part, own.view(-1))
        dist.all_reduce(own)
        dist.barrier()
    total = size * (size + 1) / 2
    assert [one.tolist() for one in gathered] == [[q + 1.0] * 3 for q in range(size)]
    assert part.tolist() == [total] * 3 and own.tolist() == [[total] * 3] * size


def every_object() -> list[Any]:
    """Collectives of objects: shapes differ from rank to rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 100})
    told: list[Any] = [rank, "told"] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    parts: list[Any] = [None]
    dist.scatter_object_list(parts, [f"for {q}" for q in range(size)] if rank == 0 else None, 0)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, at_root, 0)
    return [everyone, told, parts, at_root]


# --- random operations against a serial reference -------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8,
          torch.int64, torch.int8, torch.int16]  # fmt: skip


def draw(number: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, (count,), generator=generator).to(
        dtype
    )


def in_order(name: str, tensors: list[Tensor]) -> Tensor:
    """One rank after the other, rounded after each, as one process adds up; of sums, means and such."""
    dtype = tensors[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    act = {"sum": torch.add, "avg": torch.add}.get(name)
    if act is None or len(tensors) < 3:
        return reference(name, tensors)
    wide = [t.float() for t in tensors] if half else tensors
    total = wide[0]
    for tensor in wide[1:-1]:
        total = act(total, tensor).to(dtype).to(total.dtype)
    total = act(total, wide[-1])
    return (total / len(tensors) if name == "avg" else total).to(dtype)


def reference(
    name: str, tensors: list[Tensor], nodes: Sequence[int] | None = None, *, rounds: bool = False
) -> Tensor:
    """In the order of a binary tree over the ranks; 16-bit floats in float32, rounded once.

    With the nodes of the ranks: in that of a tree over nodes, each of which is one over its ranks, and
    `rounds` its sum.
    """
    dtype = tensors[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    acting = [t.float() for t in tensors] if half else tensors
    act = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum,
           "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or,
           "bxor": torch.bitwise_xor}[name]  # fmt: skip

    def tree(leaves: list[Tensor]) -> Tensor:
        if len(leaves) == 1:
            return leaves[0]
        middle = 1 << (len(leaves) - 1).bit_length() - 1
        return act(tree(leaves[:middle]), tree(leaves[middle:]))

    parts: dict[int, list[Tensor]] = {}
    for tensor, node in zip(acting, nodes or [0] * len(acting), strict=True):
        parts.setdefault(node, []).append(tensor)
    sums = [*map(tree, parts.values())]
    if half and rounds:
        sums = [one.to(dtype).float() for one in sums]
    result = tree(sums)
    if name == "avg":
        result = result / len(tensors)
    return result.to(dtype)


def laid_out(tensor: Tensor, how: str) -> Tensor:
    """The same numbers, contiguous, with gaps, in an arena, or not beginning at an aligned address."""
    if how == "gaps":
        return tensor.new_zeros(tensor.numel(), 2)[:, 0].copy_(tensor)
    if how == "offset":
        return tensor.new_zeros(tensor.numel() + 1)[1:].copy_(tensor)
    if how == "arena":
        allocate: Any = dist.group.WORLD
        return allocate.allocate_tensor(tensor.numel(), dtype=tensor.dtype).copy_(tensor)
    return tensor.clone()


def random_operations(  # noqa: PLR0917 - a pool passes them by position
    seed: int,
    rounds: int,
    most_bytes: int,
    nodes: Sequence[int] | None = None,
    own_partials: bool = False,
    one_by_one: bool = False,
) -> int:
    """Random reductions in the world and in halves of it, several at once; how many were checked."""
    choose = random.Random(seed)  # alike on all ranks
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    groups = [dist.new_group(half) if half else None for half in halves]
    if one_by_one:
        for group in (dist.group.WORLD, groups[rank % 2]):
            if group is not None:
                add_in_order(group)
    checked = 0
    for number in range(rounds):
        pending: list[tuple[Any, Tensor, Tensor]] = []
        for part in range(choose.randint(1, 4)):
            dtype, small = choose.choice(DTYPES), choose.random() < 0.7
            name = choose.choice([n for n in REDUCTIONS if suits(n, dtype) and n != "prod"])
            most = min(most_bytes, 5000 if small else most_bytes) // dtype.itemsize
            count, world = choose.randint(0, most), choose.random() < 0.5
            hows = [choose.choice(["plain", "gaps", "offset", "arena"]) for _ in range(size)]
            if choose.random() < 0.3:
                hows = ["arena"] * size
            members = list(range(size)) if world else halves[rank % 2]
            group = None if world else groups[rank % 2]
            key = number * 10 + part
            where = nodes and [nodes[q] for q in members]
            drawn = [draw(key, q, count, dtype) for q in members]
            expected = reference(name, drawn, where, rounds=own_partials)
            if one_by_one:
                expected = in_order(name, drawn)
            tensor = laid_out(draw(key, rank, count, dtype), hows[rank])
            work = dist.all_reduce(tensor, REDUCTIONS[name], group, async_op=choose.random() < 0.6)
            pending.append((work, tensor, expected))
        for work, tensor, expected in pending:
            done(work)
            assert raw(tensor) == raw(expected), (number, tensor, expected)
            checked += 1
    return checked


def sums_of_halves(count: int) -> list[bytes]:
    """All-reduce and reduce-scatter of bfloat16, and the mean of float16."""
    size, rank = dist.get_world_size(), dist.get_rank()
    total = draw(1, rank, count, torch.bfloat16)
    dist.all_reduce(total)
    mean = draw(2, rank, count, torch.float16)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    part = torch.empty(count, dtype=torch.bfloat16)
    dist.reduce_scatter(part, [draw(3, rank, count, torch.bfloat16) for _ in range(size)])
    return [raw(total), raw(mean), raw(part)]


# --- what fails -----------------------------------------------------------------------------------


def mismatch() -> str:
    """Rank 1 sums something else; afterwards the group works on."""
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    text = ""
    try:
        dist.all_reduce(torch.ones(3, dtype=dtype))
    except RuntimeError as problem:
        text = str(problem)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 2
    return text


def mismatch_on_nodes() -> str:
    """Rank 1 sums something else; what each is told, in this operation or the next."""
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(3, dtype=dtype))
        except RuntimeError as problem:
            return str(problem)
    return ""


def lateness(by_s: float = 1.5) -> tuple[float, str]:
    """Rank 1 does not come; seconds until the others give up, and what they say."""
    if dist.get_rank() == 1:
        time.sleep(by_s)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000))
    except RuntimeError as problem:
        return time.monotonic() - start, str(problem)
    return time.monotonic() - start, ""


def killed(later: bool, count: int = 1 << 20) -> tuple[float, str]:
    """Rank 1 dies in the middle of a stream of sums; seconds until this rank knew, and what it was told."""
    tensor = torch.ones(count)
    until = time.monotonic() + 0.3
    try:
        while True:
            if dist.get_rank() == 1 and time.monotonic() > until:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            done(dist.all_reduce(tensor, async_op=later))
    except RuntimeError as problem:
        return time.monotonic() - start, str(problem)


def killed_before(size: int) -> tuple[float, str]:
    """Rank 1 dies before it broadcasts, or after more; seconds until rank 0 knew, and what it was told."""
    tensor, rank = torch.ones(size), dist.get_rank()
    dist.all_reduce(torch.ones(1))
    for _ in range(size % 4):
        dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dist.broadcast(tensor, 1)
    except RuntimeError as problem:
        return time.monotonic() - start, str(problem)
    return time.monotonic() - start, ""


def stopped() -> str:
    """Rank 1 is stopped for a while in the middle of a stream of broadcasts; what rank 0 is told."""
    tensor, here = torch.ones(4 << 20), os.getpid()
    dist.broadcast(tensor, 1)
    if dist.get_rank() == 1 and not os.fork():
        time.sleep(0.3)
        os.kill(here, signal.SIGSTOP)
        time.sleep(4)
        os.kill(here, signal.SIGCONT)
        os._exit(0)
    try:
        while True:
            dist.broadcast(tensor, 1)
    except RuntimeError as problem:
        return str(problem)


def at_ports(first: int, last: int) -> int:
    """The port at which this rank takes streams once it has been told at which it may."""
    streams._calls = None  # pyright: ignore[reportPrivateUsage] - it has begun to for the group of all
    streams.configure(Comm(ports=f"{first}-{last}"))
    try:
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group())
        assert total.item() == dist.get_world_size()
        return streams.door().port
    finally:
        streams.configure(Comm())


def killed_with_a_child() -> tuple[float, str]:
    """As `killed`, and what rank 1 has forked lives on for a while, as workers of a loader do."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and not os.fork():
        time.sleep(6)
        os._exit(0)
    return killed(later=False)


def killed_in_a_message() -> tuple[float, str]:
    """Rank 1 dies while it sends; seconds until rank 0 knew, and what it was told."""
    if dist.get_rank() == 1:
        dist.isend(torch.ones(100 << 20), 0)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(1000):
            dist.recv(torch.empty(100 << 20), 1)
    except RuntimeError as problem:
        return time.monotonic() - start, str(problem)
    return 0.0, ""


def wrong_length() -> str:
    """A message that is longer than the tensor that takes it."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(10), 1)
        return ""
    if dist.get_rank() > 1:
        return ""
    try:
        dist.recv(torch.ones(5), 0)
    except RuntimeError as problem:
        return str(problem)
    return "nothing"


def in_a_child() -> list[str]:
    """What a forked child of rank 0 is told; its parent is a rank as before."""
    found = list[str]()
    if dist.get_rank() == 0:
        reader, writer = os.pipe()
        if not os.fork():
            for call in (
                lambda: dist.all_reduce(torch.ones(3)),
                lambda: dist.broadcast(torch.ones(3), 0, async_op=True),
                lambda: dist.send(torch.ones(3), 1),
            ):
                try:
                    call()
                    os.write(writer, b"it took part\n")
                except RuntimeError as problem:
                    os.write(writer, f"{problem}\n".encode())
            dist.destroy_process_group()  # of the copy
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            found = lines.read().splitlines()
        os.wait()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    return found


def dropped_works() -> list[float]:
    """Works that nobody waits for, tensors that nobody holds; the last sum is right all the same."""
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), async_op=True)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def after_the_end() -> str:
    """A group that was destroyed refuses everything, instead of touching memory that is gone."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    dropped = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert dropped is not None
    dropped.wait()
    dist.destroy_process_group(group)
    texts: list[str] = []
    for act in (
        lambda: group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait(),
        lambda: group.barrier().wait(),
        lambda: group.send([torch.ones(1)], 1 - dist.get_rank(), 0).wait(),
    ):
        try:
            act()
        except RuntimeError as problem:
            texts.append(str(problem))
    assert len(set(texts)) == 1 and len(texts) == 3, texts
    return texts[0]


def futures() -> list[float]:
    """Many sums under way, their futures set by a thread while this one posts more; what they held."""
    pending = [
        dist.all_reduce(torch.full((100,), float(number)), async_op=True) for number in range(200)
    ]
    waiting = [work.get_future() for work in pending if work is not None]
    del pending
    more = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(200)]
    found = [future.wait()[0][-1].item() for future in waiting]
    for work in more:
        done(work)
    return found
