"""How fast copies to slower memory are while a net computes, and what they cost it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fivefold.parallel.memory.simulate import Link
from fivefold.parallel.memory.spill import Pool, Rates, Spilled, Store

__all__ = ["measured_link", "seen_link"]

_BYTES, _COPIES = 4 << 20, 6


def measured_link(store: Store, device: torch.device) -> Link:
    """Measured once, with convolutions under way meanwhile. Takes a fraction of a second."""
    x, weight = torch.ones(1, 32, 96, 96, device=device), torch.ones(32, 32, 3, 3, device=device)
    pool = Pool(store, _BYTES * _COPIES)
    sources = [torch.ones(_BYTES // 4, device=device) for _ in range(_COPIES)]
    items: list[Spilled] = []

    def compute() -> None:
        F.conv2d(x, weight)

    def out() -> Callable[[], bool]:
        items.extend(pool.put(source) for source in sources)
        return lambda: all(item.is_out for item in items)

    def back() -> Callable[[], bool]:
        for item in items:
            item.fetch()
        return lambda: all(item.is_back for item in items)

    with torch.no_grad():
        _timed(lambda: lambda: True, compute, rounds=8)
        alone_s = _timed(lambda: lambda: True, compute, rounds=32)
        out_s, out_each_s = _timed_copies(out, compute)
        sources.clear()
        pool.settle()
        back_s, back_each_s = _timed_copies(back, compute)
    size = _BYTES * _COPIES
    rounds_s = max(out_each_s + back_each_s - 2 * alone_s, 0.0)
    # What a round took longer, as a part of it: so much of the time of a copy is lost to computing.
    lost = min(rounds_s / max(out_each_s + back_each_s, 1e-9), 1.0)
    store.rates = Rates()  # the first copies to a file take longer
    return Link(size / out_s, size / back_s, lost * (out_s + back_s) / (2 * size))


def seen_link(link: Link, rates: Rates) -> Link:
    """A link as copies of steps found it."""
    out, back = rates.of(0), rates.of(1)
    return Link(out or link.out_bytes_per_s, back or link.back_bytes_per_s, link.drag_s_per_byte)


def _timed(
    begin: Callable[[], Callable[[], bool]], compute: Callable[[], None], rounds: int
) -> float:
    """Seconds of one round of computing."""
    begin()
    began = time.perf_counter()
    for _ in range(rounds):
        compute()
    _wait()
    return (time.perf_counter() - began) / rounds


def _timed_copies(
    begin: Callable[[], Callable[[], bool]], compute: Callable[[], None]
) -> tuple[float, float]:
    """Seconds until copies have ended, and of a round of computing meanwhile."""
    began, rounds = time.perf_counter(), 0
    done = begin()
    while True:
        compute()
        _wait()
        rounds += 1
        if done():
            taken = time.perf_counter() - began
            return taken, taken / rounds


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
