"""A choice and the pool that carries it out, as a run of a program is given them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.memory.saving import Saving, Watch
from fivefold.parallel.memory.spill import Pool

__all__ = ["Budgeted", "NodeTimes"]

_Key = TypeVar("_Key")
_Stamp = Any
"""a moment: seconds, or an event of a GPU"""
_Pauses = list[tuple[_Stamp, _Stamp]]


class NodeTimes(Watch):
    """Seconds of nodes. On a GPU they are read when they are asked for: nothing is waited for before.

    Backward tells what it needs, from the last node to the first: between two such moments are the nodes
    between. What is computed again comes first, and counts as that. Waiting for copies does not count.
    """

    def __init__(self, nodes: int, device: torch.device) -> None:
        self._nodes, self._device = nodes, device
        self._forward: list[tuple[int, _Stamp, _Stamp, _Pauses]] = []
        self._backward: list[tuple[tuple[int, int], _Stamp, _Stamp, _Pauses]] = []
        """(a, b): of the backward of nodes (a, b]"""
        self._mark: tuple[int, _Stamp] | None = None
        self._pauses: _Pauses = []
        """since then"""

    @contextmanager
    def of(self, node: int) -> Generator[None]:
        """Within the block it is computed."""
        began, self._pauses = self._now(), []
        yield
        ended = self._now()
        self._forward.append((node, began, ended, self._pauses))
        self._mark, self._pauses = (node, ended), []

    def needs(self, node: int) -> None:
        """See `Watch`."""
        if self._mark is not None and self._mark[0] == node:
            return
        now = self._now()
        if self._mark is not None and node < self._mark[0]:
            self._backward.append(((node, self._mark[0]), self._mark[1], now, self._pauses))
        self._mark, self._pauses = (node, now), []

    @contextmanager
    def paused(self) -> Generator[None]:
        """See `Watch`."""
        began = self._now()
        yield
        self._pauses.append((began, self._now()))

    def _now(self) -> _Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _taken(self, began: _Stamp, ended: _Stamp) -> float:
        return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3

    def _least(self, spans: Iterable[tuple[_Key, _Stamp, _Stamp, _Pauses]]) -> dict[_Key, float]:
        found: dict[_Key, float] = {}
        for key, began, ended, pauses in spans:
            taken = self._taken(began, ended) - sum(self._taken(*pause) for pause in pauses)
            found[key] = max(min(taken, found.get(key, taken)), 0.0)
        return found

    def seconds(self) -> tuple[list[float], list[float]] | None:
        """By node, forward and backward; None where nothing was computed. Nodes of others take none."""
        if not self._forward:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        least = self._least(self._forward)
        forward = [least.get(node, 0.0) for node in range(self._nodes)]
        told, times = [0.0] * len(forward), [0] * len(forward)
        for (first, last), taken in self._least(self._backward).items():
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

    def saving(self, mine: Iterable[Tensor]) -> Saving | None:
        """For one run, to which `mine` are given; None where nothing is spilled, and nobody watches."""
        watch, spilled = self.watch or self.times, self.choice.spilled
        return Saving(self.pool, spilled, mine, watch) if spilled or watch else None
