"""Rounds in which contenders take turns, so that what drifts slowly meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bystanders import Bystanders
from contender import Contender

T = TypeVar("T")
W = TypeVar("W")
Blocks = dict[str, list[list[float]]]
"""by contender and round: seconds of each step"""


def alternate(
    running: Sequence[Contender],
    rounds: int,
    steps: int,
    told: Callable[[int, Mapping[str, Sequence[Sequence[float]]]], str],
) -> tuple[Blocks, Bystanders]:
    """Rounds of one block of `steps` steps per contender, see `take_turns`."""
    return take_turns(running, rounds, lambda contender: contender.block(steps), told)


def take_turns(
    running: Sequence[Contender],
    rounds: int,
    ask: Callable[[Contender], T],
    told: Callable[[int, Mapping[str, Sequence[T]]], str],
) -> tuple[dict[str, list[T]], Bystanders]:
    """Rounds of one question per contender that nobody disturbed, in an order that changes every time.

    `told(done, answers)` is the line that is printed after each.
    """
    ways = {contender.kind.name: contender for contender in running}
    return undisturbed(ways, rounds, ask, told, lambda: sum(c.used_s() for c in running))


def undisturbed(
    ways: Mapping[str, W],
    rounds: int,
    ask: Callable[[W], T],
    told: Callable[[int, Mapping[str, Sequence[T]]], str],
    own_s: Callable[[], float],
) -> tuple[dict[str, list[T]], Bystanders]:
    """The same for anything that has a name; `own_s` as `Bystanders` wants it."""
    answers: dict[str, list[T]] = {name: [] for name in ways}
    others = Bystanders(rounds, own_s)
    done = 0
    while done < rounds:
        others.begin()
        turn = order(list(ways), done + others.disturbed)
        latest = {name: ask(ways[name]) for name in turn}
        if not others.were_quiet():
            continue
        done += 1
        for name, answer in latest.items():
            answers[name].append(answer)
        print(told(done, answers), flush=True)
    return answers, others


def order(running: Sequence[T], number: int) -> list[T]:
    """Forwards, backwards, and rotated by one after every two rounds: of two, too, each is first as often."""
    first = number // 2 % len(running)
    turned = [*running[first:], *running[:first]]
    return turned if number % 2 == 0 else turned[::-1]
