"""The table of contenders that train with the same batches, and the bound beside each figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from augmentation import PAIR, PAIR_TITLES
from augmentation import TITLES as ALONE
from bounds import Rates, at_most
from figures import Median, ratio, table
from publishing import conditions

__all__ = ["section"]

GOALS = {"local": 0.9, "remote": 0.85}
"""of the bound"""
BESIDE_TORCH = 0.95
TITLES = {**ALONE, **PAIR_TITLES}
EXTRA = "The helper (core 1) is extra hardware; the trainer has core 0 and one thread."

Answers = Mapping[str, Sequence[Any]]


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    work = result["work"]
    lines = [f"### {work['title']}, batches of {work['batch']}", EXTRA]
    if result["part"] == PAIR:
        lines.append(
            "Two trainers share core 0, and so do their helpers core 1: samples are those of both together. "
            "One helper for both should do as well as two, and share itself out fairly."
        )
    for quota, found in result["quotas"].items():
        lines += _at(quota, found["blocks"])
    lines.append(f"Blocks of {result['block_s']:g} s. {conditions(result)}")
    return "\n\n".join(lines)


def _at(quota: str, blocks: Answers) -> Iterator[str]:
    rates, alone = _rates(blocks, at_once=True), _rates(blocks, at_once=False)
    speed = {name: _speeds(blocks[name]) for name in TITLES if name in blocks}
    yield f"**Helper with {quota} % of core 1**"
    yield table(_HEADER, [_row(name, speed, blocks, rates) for name in speed])
    yield (
        f"Alone, the trainer trains {_median([one.train for one in alone]):.0f} samples/s and the helper "
        f"makes {_median([one.augment for one in alone]):.0f}; both at once "
        f"{_median([one.train for one in rates]):.0f} and {_median([one.augment for one in rates]):.0f}. "
        f"Augmentation is {_median([one.own_s * one.none for one in alone]):.0%} of the time without "
        f"helper. Bound, times the speed without helper, from rates at once: {Median.of(at_most(rates))} if "
        "the trainer makes what the helper does not, "
        f"{_median([one.waits / one.none for one in rates]):.3f} if it only waits; from rates alone "
        f"{_median(at_most(alone)):.3f}."
    )
    yield from _goals(speed, rates)
    for name in (n for n in PAIR_TITLES if n in blocks):
        fair = Median.of([min(a["each"]) / max(a["each"]) for a in blocks[name]])
        yield f"*{TITLES[name]}*: the slower trainer trains {fair} of what the faster one does."


_HEADER = (
    "", "samples/s", "times no helper [95 %]", "of the bound [95 %]", "times DataLoader [95 %]",
    "waits for data", "CPU ms per sample",
)  # fmt: skip


def _row(
    name: str, speed: Mapping[str, Sequence[float]], blocks: Answers, rates: Sequence[Rates]
) -> list[str]:
    own, told = speed[name], blocks[name]
    helped = name != "none"
    return [
        TITLES[name],
        f"{_median(own):.0f}",
        str(ratio(own, speed["none"])) if helped else "1",
        str(_of_bound(own, rates)) if helped else "",
        str(ratio(own, speed["torch"])) if name in GOALS and "torch" in speed else "",
        f"{_median([a['load_s'] / a['wall_s'] for a in told]):.0%}",
        f"{_median([1e3 * a['cpu_s'] / a['all_samples'] for a in told]):.2f}",
    ]


def _goals(speed: Mapping[str, Sequence[float]], rates: Sequence[Rates]) -> Iterator[str]:
    for name, goal in GOALS.items():
        if name not in speed:
            continue
        found = _of_bound(speed[name], rates)
        yield f"Goal, *{TITLES[name]}* at least {goal:.0%} of the bound: {found.at_least(goal)}."
        if name == "local" and "torch" in speed:
            beside = ratio(speed[name], speed["torch"])
            yield f"Goal, at least {BESIDE_TORCH} times DataLoader: {beside.at_least(BESIDE_TORCH)}."


def _of_bound(speed: Sequence[float], rates: Sequence[Rates]) -> Median:
    return ratio(speed, [one.steals for one in rates])


def _speeds(told: Sequence[Any]) -> list[float]:
    return [answer["samples"] / answer["wall_s"] for answer in told]


def _rates(blocks: Answers, *, at_once: bool) -> list[Rates]:
    """Of each round."""
    none, alone = _speeds(blocks["none"]), _speeds(blocks["train"])
    train, augment = (
        _speeds([a[name] for a in blocks["at-once"]] if at_once else blocks[name])
        for name in ("train", "augment")
    )
    own_s = [max(1 / n - 1 / t, 0.0) for n, t in zip(none, alone, strict=True)]
    return [Rates(*row) for row in zip(none, train, augment, own_s, strict=True)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
