"""Which cores each rank of a node runs on: its own, near its GPU.

Where memory is nearer to some cores than to others, and where ranks share a device, a rank, its loader's
workers and its threads stay on their share of the granted cores, and no core belongs to two ranks. Where
there are fewer physical cores than ranks, or a quota instead of cores, nobody is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from fivefold.cluster.cores import physical, quota
from fivefold.cluster.gpus import gpus, visible
from fivefold.cluster.processors import processors

__all__ = ["INSTANCES", "bound", "instances", "shares"]

Core = tuple[int, ...]
"""the logical cores of a physical one"""


INSTANCES = "FIVEFOLD_INSTANCES"


def instances(environ: Mapping[str, str]) -> int:
    """How many neighbouring ranks of a node share a device."""
    return int(environ.get(INSTANCES, "1"))


def bound(
    cores: Sequence[int], ranks: int, root: Path = Path("/"), *, per_device: int = 1
) -> list[tuple[int, ...]]:
    """The logical cores of each rank of this node; empty where nobody is bound.

    GPUs are dealt out in turn, each to `per_device` neighbours. One whose GPU is near to a NUMA node gets
    cores of it, unless others need them more. Ranks that share a device are always bound.
    """
    numa = {cpu: node.number for node in processors(root).numa for cpu in node.cpus}
    groups: dict[int, list[Core]] = {}
    for core in physical(cores, root):
        groups.setdefault(numa.get(core[0], 0), []).append(core)
    if (len(groups) < 2 and per_device == 1) or quota(root) is not None:
        return [()] * ranks
    usable = [gpu.numa for gpu in visible(gpus(root)) if gpu.granted and not gpu.integrated]
    wanted = [usable[rank // per_device % len(usable)] if usable else None for rank in range(ranks)]
    return shares(groups, wanted)


def shares(groups: dict[int, list[Core]], wanted: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Physical cores by NUMA node, divided among ranks that want one of these nodes, or none.

    >>> shares({0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}, [1, 0])
    [(2, 3, 6, 7), (0, 1, 4, 5)]
    >>> shares({0: [(0,), (1,)]}, [None, None, None])
    [(), (), ()]
    """
    count = len(wanted)
    if sum(map(len, groups.values())) < count:
        return [()] * count
    known = all(node in groups for node in wanted)
    by_node = {node: [r for r, w in enumerate(wanted) if w == node] for node in groups}
    if known and all(len(groups[node]) >= len(of) for node, of in by_node.items()):
        told: dict[int, tuple[int, ...]] = {}
        for node, of in by_node.items():
            told.update(zip(of, _divided(groups[node], len(of)), strict=True))
        return [told[rank] for rank in range(count)]
    return _divided([core for node in sorted(groups) for core in groups[node]], count)


def _divided(cores: Sequence[Core], parts: int) -> list[tuple[int, ...]]:
    """Neighbours to each part; the first parts get one more where it does not come out even."""
    ends = [len(cores) * part // parts for part in range(parts + 1)] if parts else []
    return [
        tuple(sorted(logical for core in cores[begin:end] for logical in core))
        for begin, end in pairwise(ends)
    ]
