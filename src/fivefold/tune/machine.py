"""This machine as a cluster, measured in about a second.

Its devices are the cores that were granted, each with its share of the memory. All of them compute at once
while one is measured, as in a run; messages go between two threads, through shared memory as those of ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.cluster import granted_cores
from fivefold.cluster.description import Cluster, Device, LinkCost
from fivefold.comm.registration import create

__all__ = ["this_machine"]

_SMALL, _LARGE = 64, 1 << 20
"""numbers in a message"""


def this_machine(devices: int | None = None) -> Cluster:
    """This machine as one node of `devices`, as many as cores were granted by default.

    More devices than cores share them, and the memory.
    """
    cores = granted_cores()
    count = devices or cores
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = _device(_memory_bytes() // max(count, cores), min(count, cores))
    finally:
        torch.set_num_threads(threads)
    link = _link()
    shared = count > cores
    name = f"this machine, which share its {cores} cores" if shared else "this machine"
    return Cluster(name, 1, count, device, link, link, here=True, cores_per_node=cores)


def _device(memory_bytes: int, at_once: int) -> Device:
    x, weight = torch.rand(1, 32, 64, 64), torch.rand(32, 32, 3, 3)
    source = torch.ones(1 << 23)  # more than a cache holds
    target, few = torch.ones_like(source), torch.ones(8)
    convolved_s = _together(lambda: F.conv2d(x, weight), at_once)
    copied_s = _together(lambda: target.copy_(source), at_once)
    called_s = _together(lambda: torch.relu(few), at_once)
    quiet_s = _together(lambda: F.conv2d(x, weight), 1)
    flops = 2 * 32 * 32 * 9 * 62 * 62
    moved = 2 * source.numel() * source.element_size()
    alone = max(convolved_s / quiet_s, 1.0)
    return Device(
        memory_bytes, flops / convolved_s, moved / copied_s, called_s, overlaps=False, alone=alone
    )


def _together(run: Callable[[], Tensor], threads: int) -> float:
    """Seconds of a call while as many threads make it, the fastest: others may be at work here."""
    taken: list[float] = []
    gate = threading.Barrier(threads)

    def repeat() -> None:
        with torch.no_grad():
            run()
            gate.wait(60)
            taken.extend(_seconds(run, 7))

    _threads([repeat] * threads)
    return max(min(taken), 1e-9)


def _link() -> LinkCost:
    """Between two threads of this process."""
    store = dist.HashStore()
    found: dict[tuple[str, int], float] = {}

    def rank(number: int) -> None:
        options = SimpleNamespace(
            store=store,
            group_rank=number,
            group_size=2,
            group_id="link",
            timeout=timedelta(seconds=30),
        )
        group: Any = create(options, None)

        def swap(tensor: Tensor, into: Tensor) -> None:
            sent = group.send([tensor], 1 - number, 0)
            group.recv([into], 1 - number, 0).wait()
            sent.wait()

        for size in (_SMALL, _LARGE):
            one, other = torch.zeros(size), torch.zeros(size)
            found["message", size] = min(_seconds(lambda one=one, other=other: swap(one, other), 9))
        few = torch.zeros(_SMALL)

        def total() -> None:
            group.allreduce([few]).wait()

        found["sum", _SMALL] = min(_seconds(total, 9))
        group.shutdown()

    _threads([lambda: rank(0), lambda: rank(1)])
    small, large = ((4 * size, found["message", size]) for size in (_SMALL, _LARGE))
    return LinkCost.through(small, large, found["sum", _SMALL])


def _threads(bodies: list[Callable[[], None]]) -> None:
    problems: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as problem:  # noqa: BLE001 - raised again by who waits
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _seconds(run: Callable[[], object], times: int) -> list[float]:
    run()
    found: list[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
