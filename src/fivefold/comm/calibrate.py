"""What collectives of a group take while nothing else goes on: what later ones are compared with."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.trace import Tag

__all__ = ["calibration", "links"]

_SIZES_BYTES = tuple(1 << n for n in (10, 14, 16, 18, 20, 22, 24))
_ENOUGH_S = 0.4
"""no further size once so much time has passed"""
_MOST_TURNS = 10
_EACH_S = 0.03
_MOST_LINKS = 64
_MESSAGE_BYTES = 1 << 20
_TURNS, _DOUBTS = 5, 2
_DOUBTFUL = 0.5
"""of what the faster quarter of links does, as where reports begin to blame a link"""


def calibration(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Seconds of an all_reduce by size in bytes, of the slowest rank, median of a few. Collective.

    Takes about half a second at most, unless one of 1 KiB takes longer.
    """
    found: list[dict[str, Any]] = []
    if group.size() == 1:
        return found
    begun_s = 0.0
    for size in _SIZES_BYTES:
        tensor = torch.zeros(size // 4)
        first_s = _slowest([_timed(tensor, group), _timed(tensor, group)][1:], group)[0]
        turns = max(3, min(_MOST_TURNS, int(_EACH_S / max(first_s, 1e-7))))
        took_s = _slowest([_timed(tensor, group) for _ in range(turns)], group)
        seconds = statistics.median(took_s)
        found.append({"op": "all_reduce", "group": 0, "size_bytes": size, "seconds": seconds})
        begun_s += (turns + 2) * seconds
        # Agreed, since all ranks know the slowest: the next size is four times as large.
        if begun_s + 5 * 4 * seconds > _ENOUGH_S:
            break
    return found


def links(group: dist.ProcessGroup, nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Between first ranks of neighbours in the ring of nodes: latency, and bytes per second. Collective.

    Known to all ranks of `group`. Of 64 links at most. One that is far below the others is measured again:
    another process may just have had its core.
    """
    firsts = [nodes.index(node) for node in sorted(set(nodes))]
    # A ring, so that a node at fault has two slow links.
    ring = [*firsts, firsts[0]] if len(firsts) > 2 else firsts
    pairs = list(itertools.pairwise(ring))[:_MOST_LINKS]
    if not pairs:
        return []
    found = _measured(pairs, [_TURNS] * len(pairs), group)
    for _ in range(_DOUBTS):
        rates = _rates(found)
        least = _DOUBTFUL * float(rates.quantile(0.75))
        doubtful = [n for n, rate in enumerate(rates.tolist()) if rate < least]
        if not doubtful:
            break
        turns = [max(1, min(_TURNS, int(_EACH_S / float(found[n, 1])))) for n in doubtful]
        again = _measured([pairs[n] for n in doubtful], turns, group)
        found[doubtful] = found[doubtful].minimum(again)
    return [
        {"ranks": list(pair), "latency_s": latency_s, "bytes_per_s": rate}
        for pair, latency_s, rate in zip(
            pairs, found[:, 0].tolist(), _rates(found).tolist(), strict=True
        )
    ]


def _rates(seconds: Tensor) -> Tensor:
    """Bytes per second of links, from seconds of a short and a long message, (links, 2)."""
    return _MESSAGE_BYTES / (seconds[:, 1] - seconds[:, 0]).clamp_min(1e-9)


def _measured(
    pairs: Sequence[tuple[int, int]], turns: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Seconds of a short and a long message on links, one after the other; float64, (links, 2). Collective.

    `turns` are those of the long one.
    """
    own = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for number, (one, other) in enumerate(pairs):
        if group.rank() in (one, other):
            first, peer = group.rank() == one, other if group.rank() == one else one
            short, long = torch.zeros(2), torch.zeros(_MESSAGE_BYTES // 4)
            # A short one that came late would make the link fast: always the least of several.
            short_s = _turn_s(short, group, peer, first=first, turns=_TURNS)
            long_s = _turn_s(long, group, peer, first=first, turns=turns[number])
            if first:
                own[number] = torch.tensor([short_s, long_s])
    return comm.all_reduce(own, group, Tag.CONTROL)


def _turn_s(
    tensor: Tensor, group: dist.ProcessGroup, peer: int, *, first: bool, turns: int
) -> float:
    """Half of the time that a tensor takes there and back, the least of some turns."""
    found: list[float] = []
    for _ in range(turns):
        begun = time.perf_counter()
        if first:
            dist.send(tensor, group=group, group_dst=peer)
            dist.recv(tensor, group=group, group_src=peer)
        else:
            dist.recv(tensor, group=group, group_src=peer)
            dist.send(tensor, group=group, group_dst=peer)
        found.append((time.perf_counter() - begun) / 2)
    return min(found)


def _timed(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    begun = time.perf_counter()
    comm.all_reduce(tensor, group, Tag.CONTROL)
    return time.perf_counter() - begun


def _slowest(seconds: list[float], group: dist.ProcessGroup) -> list[float]:
    """Of each turn, what the slowest rank took."""
    told = torch.tensor(seconds, dtype=torch.float64)
    return comm.all_gather(told, group, Tag.CONTROL).max(dim=0).values.tolist()
