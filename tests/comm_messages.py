"""What ranks of the tests of messages do. Each runs within a default group."""

from __future__ import annotations

import random
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from comm_checks import done, mine, raw


def every_message(count: int) -> list[bytes]:
    """Round a ring, tags out of order, and from anyone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    own, got = mine(rank, (count,), torch.float32), torch.zeros(count)
    found: list[bytes] = []
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, got, left)]
    )
    for work in works:
        work.wait()
    found.append(raw(got))
    first, second = torch.zeros(count), torch.zeros(count)
    sends = [dist.isend(own, right, tag=1), dist.isend(own * 2, right, tag=2)]
    takes = [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
    for work in [*takes, *sends]:
        assert work is not None
        work.wait()
    found += [raw(first), raw(second)]
    if rank == 0:
        seen: dict[int, bytes] = {}
        for _ in range(size - 1):
            source = dist.recv(got)
            seen[source] = raw(got)
        found += [seen[source] for source in sorted(seen)]
    else:
        dist.send(own, 0)
    dist.barrier()
    return found


def many_messages(seed: int) -> int:
    """Hundreds under way at once, of many sizes and three tags, some waited for by nobody; how many came."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plan, own = random.Random(seed), random.Random(seed * size + rank)
    sizes = [0, 1, 3, 50, 4000, 4090, 70_000]
    sent = [
        (*plan.sample(range(size), 2), plan.randrange(3), plan.choice(sizes)) for _ in range(400)
    ]
    numbered = [(number, *what) for number, what in enumerate(sent)]
    asked = [what for what in numbered if what[1] == rank]
    awaited = [what for what in numbered if what[2] == rank]
    own.shuffle(lines := [True] * len(asked) + [False] * len(awaited))
    sends, takes = iter(asked), iter(awaited)
    works: list[dist.Work | None] = []
    got: list[tuple[int, Tensor]] = []
    for sending in lines:
        number, source, to, tag, count = next(sends if sending else takes)
        if sending:
            work = dist.isend(torch.full((count,), float(number)), to, tag=tag)
            works += [work] if own.random() < 0.7 else []
        else:
            got.append((number, torch.full((count,), -1.0)))
            works.append(dist.irecv(got[-1][1], source, tag=tag))
    own.shuffle(works)
    for work in works:
        done(work)
    assert all((tensor == number).all() for number, tensor in got)
    dist.barrier()
    return len(got)


def sent_before_the_end(count: int) -> float | None:
    """Rank 0 sends and leaves; rank 1 receives later, and adds up."""
    sent = torch.ones(count)
    if dist.get_rank() == 0:
        dist.send(sent, 1)
        return None
    time.sleep(2)
    sent.zero_()
    dist.recv(sent, 0)
    return float(sent.sum())


def kept_messages() -> list[bool]:
    """Exchange messages; whether the group still holds on to what each received, once the next has begun."""
    rank = dist.get_rank()
    received: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        into = torch.zeros(1000)
        for work in (dist.isend(torch.ones(1000), 1 - rank), dist.irecv(into, 1 - rank)):
            done(work)
        received.append(weakref.ref(into))
        del into, work
    return [ref() is not None for ref in received[:2]]


def other_dtype(count: int) -> list[str]:
    """What rank 1 is told of messages of `count` numbers that rank 0 sends as another dtype."""
    rank, found = dist.get_rank(), list[str]()
    pairs = [
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
        (torch.uint8, torch.bool),
    ]
    for tag, (sent, wanted) in enumerate(pairs):
        if rank == 0:
            done(dist.isend(torch.ones(count, dtype=sent), 1, tag=tag))
            continue
        got = torch.zeros(count, dtype=wanted)
        try:
            dist.recv(got, 0 if tag else None, tag=tag)
        except RuntimeError as problem:
            found.append(str(problem))
        assert not got.any()
    last = torch.full((count,), float(rank))
    if rank == 0:
        dist.send(torch.full((count,), 5.0), 1, tag=9)
    else:
        dist.recv(last, 0, tag=9)
        assert last.eq(5).all()
    return found
