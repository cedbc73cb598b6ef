"""Collectives of ranks that share a device: time, and how much of its copy bandwidth that is.

fivefold run -n 4 --set comm.backend=fivefold benchmarks/share/collectives.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import fivefold as ff
from fivefold.comm import shared_zeros

TINY = bool(os.environ.get("CAMPAIGN_TINY"))
SIZES = (4, 64 << 10) if TINY else (4, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
ROUNDS = 3 if TINY else 7


def timed(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """The median of seconds."""
    call()
    taken: list[float] = []
    for _ in range(ROUNDS):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main() -> None:
    """A line for each operation and size, from the first rank."""
    with ff.start() as mesh:
        device, group = mesh.device, mesh.group("data")

        def wait() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(group)

        for size_bytes in SIZES:
            count = max(size_bytes // 4, mesh.size)
            tensor = torch.ones(count, device=device)
            bucket = shared_zeros(count, tensor, group).fill_(1)  # as gradients lie
            other = torch.empty_like(tensor)
            copied_s = timed(lambda tensor=tensor, other=other: other.copy_(tensor), wait)
            calls = {
                "all_reduce": lambda tensor=tensor: dist.all_reduce(
                    tensor, dist.ReduceOp.AVG, group=group
                ),
                "of a bucket": lambda bucket=bucket: dist.all_reduce(
                    bucket, dist.ReduceOp.AVG, group=group
                ),
                "broadcast": lambda tensor=tensor: dist.broadcast(tensor, group=group, group_src=0),
            }
            for name, call in calls.items():
                seconds = timed(call, wait)
                assert bool((tensor == 1).all() and (bucket == 1).all()), (
                    f"{name} of {size_bytes} bytes is wrong"
                )
                if mesh.rank == 0:
                    print(
                        f"{name:11} {size_bytes:>11,} B {1e6 * seconds:>11,.0f} us  "
                        f"{copied_s / seconds:.3f} of a copy's speed",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
