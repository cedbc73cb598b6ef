"""Whether agents take processor time from training, or have cores of their own."""

from __future__ import annotations

import os

from fivefold.checkpoint.members import Members
from fivefold.checkpoint.ranks import Ranks
from fivefold.cluster.cores import granted_cores

__all__ = ["agents_share", "is_crowded"]


def agents_share(ranks: Ranks, members: Members, threads: int) -> bool:
    """Whether the agent of this node runs on cores that its ranks keep busy. Collective.

    The agent may run where the first rank of the node may.

    Args:
        ranks: all.
        members: which of them share the node.
        threads: of this rank that compute; 1 where an accelerator does.
    """
    told = ranks.gather({"cores": sorted(os.sched_getaffinity(0)), "threads": threads})
    here = [told[rank] for rank in members.ranks[members.me]]
    own = set(here[0]["cores"])
    beside = [(set(one["cores"]), int(one["threads"])) for one in here if own & set(one["cores"])]
    cores = len(set[int]().union(*(held for held, _ in beside)))
    # A quota of a container holds for one process and for all of it alike.
    limited = granted_cores() < len(os.sched_getaffinity(0))
    return is_crowded(
        min(cores, granted_cores()) if limited else cores, [threads for _, threads in beside]
    )


def is_crowded(cores: int, threads: list[int]) -> bool:
    """Whether ranks with so many threads leave no core of theirs free.

    >>> is_crowded(8, [4, 4]), is_crowded(8, [4, 3]), is_crowded(64, [1, 1, 1, 1])
    (True, False, False)
    """
    return sum(threads) >= cores
