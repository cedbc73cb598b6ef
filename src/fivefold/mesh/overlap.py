"""Whether kernels of ranks that share a GPU run at the same time, by trying: nothing else tells.

rank 0 of the device   kernel         kernel      At the same time, all take as long as one alone; in turns,
rank 1                        kernel  kernel      n of them take n times as long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from fivefold.comm.store import agree

__all__ = ["slowdown", "warn_of_turns"]

IN_TURNS = 1.5
"""from what slowdown on kernels do not overlap: half of them, if there are two"""
_log = logging.getLogger(__name__)


def slowdown(
    store: dist.Store, rank: int, size: int, kernel: Callable[[], object], timeout: timedelta
) -> float:
    """How many times as long kernels of all ranks of a device take together as one alone. Collective.

    Args:
        store: that nobody else uses.
        rank: among the `size` ranks of the device.
        kernel: computes for some hundredth of a second, as long each time, and waits for its end.
        timeout: for ranks that do not come.

    Raises:
        LaunchError: a rank does not come.
    """

    def meet(step: str, told: str = "") -> list[str]:
        return agree(
            dist.PrefixStore(step, store), rank, size, told, " ".join,
            timeout=timeout, what="timing kernels of ranks that share a GPU",
        ).split()  # fmt: skip

    def timed() -> float:
        began = time.perf_counter()
        kernel()
        return time.perf_counter() - began

    timed()  # a first one also loads what it needs, and clocks rise
    alone_s = 0.0
    for turn in range(size):
        meet(f"alone-{turn}")
        if turn == rank:
            alone_s = timed()
    meet("together")
    together_s = timed()
    alone = map(float, meet("alone", str(alone_s)))
    return max(map(float, meet("told", str(together_s)))) / min(alone)


def warn_of_turns(
    store: dist.Store, rank: int, size: int, kernel: Callable[[], object], timeout: timedelta
) -> None:
    """Have the first rank of a device say so where kernels of its ranks do not overlap. See `slowdown`."""
    times = slowdown(store, rank, size, kernel, timeout)
    if rank == 0 and times > IN_TURNS:
        _log.warning(
            "kernels of the %d ranks on this GPU do not overlap: together they take %.1f times as long as "
            "one alone. Ranks of a GPU need NVIDIA's MPS: fivefold run starts it where "
            'nvidia-cuda-mps-control is installed and instances.mps of the plan is not "off"; with "on" it '
            "says why it cannot; else take one process for each GPU",
            size, times,
        )  # fmt: skip
