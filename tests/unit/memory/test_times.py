"""Seconds of nodes, by a clock that the test sets."""

from __future__ import annotations

import pytest
import torch

from fivefold.parallel.memory.budget import NodeTimes


class Clocked(NodeTimes):
    """Whose time passes when it is told to."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, torch.device("cpu"))
        self.time = 0.0

    def _now(self) -> float:
        return self.time


def stepped(times: Clocked, forward: list[float], backward: list[float], wait: float) -> None:
    """A step, in which every node waits for copies."""
    for node, taken in enumerate(forward):
        with times.of(node):
            times.time += taken / 2
            with times.paused():
                times.time += wait
            times.time += taken / 2
    for node in reversed(range(len(backward))):
        times.needs(node)
        with times.paused():
            times.time += wait
        times.needs(node)
        times.time += backward[node]
    times.needs(-1)


def test_waiting_for_copies_is_no_part_of_a_node() -> None:
    times = Clocked(4)
    stepped(times, [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], wait=100.0)
    found = times.seconds()
    assert found is not None
    assert found[0] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    # What the first node to go backward took is its time, and that of whatever came before it.
    assert found[1] == pytest.approx([5.0, 6.0, 7.0, 8.0])


def test_the_fastest_step_counts() -> None:
    times = Clocked(2)
    assert times.seconds() is None
    stepped(times, [2.0, 2.0], [3.0, 3.0], wait=1.0)
    stepped(times, [1.0, 4.0], [2.0, 6.0], wait=0.0)
    assert times.seconds() == ([1.0, 2.0], [2.0, 3.0])
