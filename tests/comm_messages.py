"""What ranks of the tests of messages do. Each runs within a default group."""

from __future__ import annotations

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
