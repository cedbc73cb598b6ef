"""How fast copies to slower memory are while a net computes, and what they cost it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from fivefold.parallel.memory.room import PAGE
from fivefold.parallel.memory.simulate import Link
from fivefold.parallel.memory.spill import Pool, Rates, Spilled, Store

__all__ = ["measured_link", "seen_link"]

_COPIES = 6
_ROOM = 7 / 8
"""of a store, that is planned with: what is let go does not always fit what comes"""


def measured_link(store: Store, device: torch.device) -> Link:
    """Measured once, with convolutions under way meanwhile. Takes a fraction of a second."""
    on_cpu = device.type == "cpu"
    samples, channels, each, convolutions = (1, 32, 4 << 20, 1) if on_cpu else (8, 64, 32 << 20, 16)
    x = torch.ones(samples, channels, 96, 96, device=device)
    weight = torch.ones(channels, channels, 3, 3, device=device)
    each = max(min(each, store.room_bytes // _COPIES), PAGE) // PAGE * PAGE
    size = each * _COPIES
    pool = Pool(store, size)
    sources = [torch.ones(each // 4, device=device) for _ in range(_COPIES)]
    for slot in [store.take(each) for _ in range(_COPIES)]:  # which takes longer once
        store.give(slot, each)
    items: list[Spilled] = []

    def compute() -> None:
        for _ in range(convolutions):
            F.conv2d(x, weight)

    def out() -> Callable[[], bool]:
        items.extend(pool.put(source) for source in sources)
        return lambda: all(item.is_out for item in items)

    def back() -> Callable[[], bool]:
        for item in items:
            item.fetch()
        return lambda: all(item.is_back for item in items)

    with torch.no_grad():
        _timed(compute, rounds=8)
        alone_s = _timed(compute, rounds=32)
        out_s, out_each_s = _timed_copies(out, compute, apart=not on_cpu)
        sources.clear()
        pool.settle()
        back_s, back_each_s = _timed_copies(back, compute, apart=not on_cpu)
    rounds_s = max(out_each_s + back_each_s - 2 * alone_s, 0.0)
    # What a round took longer, as a part of it: so much of the time of a copy is lost to computing.
    lost = min(rounds_s / max(out_each_s + back_each_s, 1e-9), 1.0)
    store.rates = Rates()  # the first copies to a file take longer
    drag = lost * (out_s + back_s) / (2 * size)
    return Link(size / out_s, size / back_s, drag, int(_ROOM * store.room_bytes))


def seen_link(link: Link, rates: Rates) -> Link:
    """A link as copies of steps found it."""
    return replace(
        link,
        out_bytes_per_s=rates.of(0) or link.out_bytes_per_s,
        back_bytes_per_s=rates.of(1) or link.back_bytes_per_s,
    )


def _timed(compute: Callable[[], None], rounds: int) -> float:
    """Seconds of one round of computing."""
    began = time.perf_counter()
    for _ in range(rounds):
        compute()
        _wait()
    return (time.perf_counter() - began) / rounds


def _timed_copies(
    begin: Callable[[], Callable[[], bool]], compute: Callable[[], None], *, apart: bool
) -> tuple[float, float]:
    """Seconds until copies have ended, and of a round of computing meanwhile.

    What it takes to begin them is lost to computing, unless this is done apart, by a GPU.
    """
    began, rounds = time.perf_counter(), 0
    done = begin()
    computing = time.perf_counter() if apart else began
    while True:
        compute()
        _wait()
        rounds += 1
        if done():
            now = time.perf_counter()
            return now - began, (now - computing) / rounds


def _wait() -> None:
    """For what is computed, not for copies."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
