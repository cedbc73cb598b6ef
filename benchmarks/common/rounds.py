"""Rounds in which contenders take turns, so that what drifts slowly meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bystanders import Bystanders
from contender import Contender

T = TypeVar("T")
Blocks = dict[str, list[list[float]]]
"""by contender and round: seconds of each step"""


def alternate(
    running: Sequence[Contender],
    rounds: int,
    steps: int,
    told: Callable[[int, Mapping[str, Sequence[Sequence[float]]]], str],
) -> tuple[Blocks, Bystanders]:
    """Rounds of one block per contender that nobody disturbed, in an order that changes from round to round.

    `told(done, blocks)` is the line that is printed after each.
    """
    blocks: Blocks = {c.kind.name: [] for c in running}
    others = Bystanders(rounds, lambda: sum(c.used_s() for c in running))
    done = 0
    while done < rounds:
        others.begin()
        latest = {c.kind.name: c.block(steps) for c in order(running, done + others.disturbed)}
        if not others.were_quiet():
            continue
        done += 1
        for name, step_s in latest.items():
            blocks[name].append(step_s)
        print(told(done, blocks), flush=True)
    return blocks, others


def order(running: Sequence[T], number: int) -> list[T]:
    """Rotated by the number of the round, and backwards in every second one."""
    first = number % len(running)
    turned = [*running[first:], *running[:first]]
    return turned if number % 2 == 0 else turned[::-1]
