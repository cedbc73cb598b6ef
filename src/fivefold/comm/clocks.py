"""How far the clocks of nodes are apart.

    first rank of a node   t0 ──ask──►            ──► t1        CLOCK_MONOTONIC of its node
    rank 0                        └── reads t ──┘               the answer is as old as half the way, about
    offset = t - (t0 + t1) / 2, of the exchange that took least; error at most (t1 - t0) / 2

Source: D. L. Mills, RFC 5905, section 8 (the same sum of two one-way delays).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fivefold import comm
from fivefold.trace import Tag

__all__ = ["clock_offset"]

_TURNS = 16


def clock_offset(group: dist.ProcessGroup, nodes: Sequence[int]) -> tuple[int, int]:
    """What to add to this node's monotonic clock to get that of rank 0's node, and the error, in ns.

    `nodes`: number of each rank's node, by rank. Collective over `group`, whose tensors are on CPUs.
    """
    rank, here = group.rank(), nodes[group.rank()]
    firsts = {node: nodes.index(node) for node in nodes}
    own = torch.zeros(2, dtype=torch.int64)
    for node in sorted(firsts):
        if node == nodes[0]:
            continue
        if rank == 0:
            _answer(group, firsts[node])
        elif rank == firsts[node]:
            own = torch.tensor(_ask(group))
    if len(firsts) == 1:
        return 0, 0
    every = comm.all_gather(own, group, Tag.CONTROL)
    offset, error = every[firsts[here]].tolist()
    return int(offset), int(error)


def _answer(group: dist.ProcessGroup, peer: int) -> None:
    told = torch.zeros(1, dtype=torch.int64)
    for _ in range(_TURNS):
        dist.recv(told, group=group, group_src=peer)
        told[0] = time.monotonic_ns()
        dist.send(told, group=group, group_dst=peer)


def _ask(group: dist.ProcessGroup) -> tuple[int, int]:
    told = torch.zeros(1, dtype=torch.int64)
    found: list[tuple[int, int]] = []
    for _ in range(_TURNS):
        begun = time.monotonic_ns()
        dist.send(told, group=group, group_dst=0)
        dist.recv(told, group=group, group_src=0)
        ended = time.monotonic_ns()
        found.append((ended - begun, int(told.item()) - (begun + ended) // 2))
    took, offset = min(found)
    return offset, (took + 1) // 2
