"""A choice and the pool that carries it out, as a run of a program is given them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.parallel.memory.choice import Choice, Key
from fivefold.parallel.memory.saving import Saving, Watch
from fivefold.parallel.memory.spill import Pool

__all__ = ["Budgeted", "NodeTimes"]


class NodeTimes:
    """Seconds of nodes: a `Watch` of runs.

    Backward tells what it needs, from the last node to the first: between two such moments are the nodes
    between. What is computed again comes first, and counts as that.
    """

    def __init__(self, nodes: int, device: torch.device) -> None:
        self._least: list[float | None] = [None] * nodes
        self._between: dict[tuple[int, int], float] = {}
        """(a, b): the least seconds of the backward of nodes (a, b]"""
        self._mark: tuple[int, float] | None = None
        self._device = device

    @contextmanager
    def of(self, node: int) -> Generator[None]:
        """Within the block it is computed."""
        began = self._now()
        yield
        ended = self._now()
        taken, least = ended - began, self._least[node]
        self._least[node] = taken if least is None else min(taken, least)
        self._mark = node, ended

    def needs(self, node: int) -> None:
        """See `Watch`."""
        if self._mark is not None and self._mark[0] == node:
            return
        now = self._now()
        if self._mark is not None and node < self._mark[0]:
            between = node, self._mark[0]
            taken = now - self._mark[1]
            self._between[between] = min(taken, self._between.get(between, taken))
        self._mark = node, now

    def computes(self, node: int) -> None:
        """See `Watch`."""

    def makes(self, index: int, key: Key) -> None:
        """See `Watch`."""

    def holds(self, key: Key, storage: int, size_bytes: int, node: int) -> None:
        """See `Watch`."""

    def lets_go(self, key: Key, storage: int, size_bytes: int) -> None:
        """See `Watch`."""

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self) -> tuple[list[float], list[float]] | None:
        """By node, forward and backward; None where nothing was computed. Nodes of others take none."""
        if all(least is None for least in self._least):
            return None
        forward = [least or 0.0 for least in self._least]
        told, times = [0.0] * len(forward), [0] * len(forward)
        for (first, last), taken in self._between.items():
            nodes = range(first + 1, last + 1)
            whole = sum(forward[n] for n in nodes)
            for n in nodes:
                told[n] += taken * (forward[n] / whole if whole else 1 / len(nodes))
                times[n] += 1
        known = [n for n, count in enumerate(times) if count]
        backward = {n: told[n] / times[n] for n in known}
        whole = sum(forward[n] for n in known)
        typical = sum(backward.values()) / whole if whole else 2.0
        return forward, [backward.get(n, typical * s) for n, s in enumerate(forward)]


@dataclass(frozen=True)
class Budgeted:
    """For the runs of one program."""

    choice: Choice
    pool: Pool | None = None
    watch: Watch | None = None
    """is told what runs do"""
    times: NodeTimes | None = None
    """likewise, and times them"""

    @property
    def idle(self) -> bool:
        """Whether runs are what they are without a budget."""
        return not (self.choice.again or self.choice.spilled or self.watch or self.times)

    def saving(self, mine: Iterable[Tensor]) -> Saving:
        """For one run, to which `mine` are given."""
        return Saving(self.pool, self.choice.spilled, mine, self.watch or self.times)
