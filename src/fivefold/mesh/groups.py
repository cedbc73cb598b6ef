"""More groups of the same ranks, for what must not meet the messages of training."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["cpu_groups"]


def cpu_groups(
    group: dist.ProcessGroup | None, count: int, timeout_s: float
) -> list[dist.ProcessGroup | None]:
    """New gloo groups of the ranks of `group`; of all ranks without one. Collective over these ranks.

    None each where torch.distributed is not running: the process is alone then.
    """
    if not dist.is_initialized():
        return [None] * count
    everyone = group is None or group.size() == dist.get_world_size()
    ranks = None if group is None else dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=timeout_s)
    made: list[dist.ProcessGroup | None] = []
    for _ in range(count):
        # Ranks outside of a smaller group do not take part, so names must not depend on a common count.
        fresh = (
            dist.new_group(None, timeout, "gloo")
            if everyone
            else dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        )
        assert isinstance(fresh, dist.ProcessGroup), "this rank is in it"
        made.append(fresh)
    return made
