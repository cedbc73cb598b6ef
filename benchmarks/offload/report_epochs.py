"""The tables of epochs with validation: what helpers save, what they could, and whether figures are equal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bounds import with_validation
from epochs import PUBLISHED, TITLES
from figures import Median, ratio, table
from publishing import conditions

__all__ = ["section"]

MOST_BESIDE_NONE, LEAST_OF_BOUND, PUBLISHED_GAIN = 1.05, 0.9, 1.175
EXTRA = "The helper (core 1) is extra hardware; the trainer has core 0 and one thread."

Seconds = Mapping[str, Sequence[float]]


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    work, epoch_s = result["work"], result["epoch_s"]
    limits = {name: _possible(result, name) for name in epoch_s}
    heading = (
        f"### {work['title']}: {work['train']} training and {work['test']} test samples an epoch"
    )
    lines = [heading, EXTRA, table(_HEADER, [_row(result, name, limits[name]) for name in epoch_s])]
    lines += [_shares(result), *_goals(result, limits), _equal(result["same_bits"])]
    if result["part"] in PUBLISHED:
        lines.append(
            "Data are made in the set's real file format, and are fewer. Published for these pairs on other "
            "machines: up to 15 %, later 17.5 %."
        )
    lines.append(f"Blocks of {result['epochs']} epochs. {conditions(result)}")
    return "\n\n".join(lines)


_HEADER = (
    "", "epoch, s [95 %]", "times no helper [95 %]", "bound", "of the bound [95 %]", "CPU, s per epoch",
)  # fmt: skip


def _row(result: Mapping[str, Any], name: str, limit: Sequence[float]) -> list[str]:
    own, base = result["epoch_s"][name], result["epoch_s"]["none"]
    cpu_s = statistics.median(result["cpu_s"][name]) / (result["epochs"] + 1)
    speed = ratio(base, own)
    helped = name not in ("none", "without")
    return [
        TITLES[name], str(Median.of(own)), str(speed) if name != "none" else "1",
        f"{statistics.median(limit):.3f}" if helped else "",
        str(_of_bound(result, name, limit)) if helped else "", f"{cpu_s:.2f}",
    ]  # fmt: skip


def _of_bound(result: Mapping[str, Any], name: str, limit: Sequence[float]) -> Median:
    own, base = result["epoch_s"][name], result["epoch_s"]["none"]
    return ratio([b / o for b, o in zip(base, own, strict=True)], limit)


def _parts(result: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Of each round, in seconds per epoch: the halves alone and at once."""
    halves = result["halves"]
    for at in range(result["rounds"]):
        alone = {name: halves[name][at]["epoch_s"] for name in ("train", "augment", "evaluate")}
        beside = {
            "train+augment": halves["train+augment"][at]["train"],
            "made": halves["train+augment"][at]["augment"],
            "train+evaluate": halves["train+evaluate"][at]["train"],
            "evaluated": halves["train+evaluate"][at]["evaluate"],
        }
        yield {**alone, **beside}


def _possible(result: Mapping[str, Any], name: str) -> list[float]:
    """Of each round, times the speed without helpers: by rates at once; the trainer makes what is left."""
    way, found = name.removesuffix("-remote"), list[float]()
    for part, none_s in zip(_parts(result), result["epoch_s"]["none"], strict=True):
        augment_s, evaluate_s = part["augment"], part["evaluate"]
        if way == "da":
            train_s, made_s = part["train+augment"], part["made"]
            possible = with_validation(train_s, 0.0, augment_s, evaluated_s=0.0, made_s=made_s)
            epoch_s = (train_s + augment_s) / possible + evaluate_s
        else:
            made_s = part["made"] if way == "hy" else 0.0
            train_s = part["train+augment"] if way == "hy" else part["train+evaluate"]
            possible = with_validation(
                train_s, evaluate_s, augment_s, evaluated_s=part["evaluated"], made_s=made_s
            )
            epoch_s = (train_s + augment_s + evaluate_s) / possible
        found.append(none_s / epoch_s)
    return found


def _shares(result: Mapping[str, Any]) -> str:
    rows = list(_parts(result))
    mean = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    whole = mean["train"] + mean["augment"] + mean["evaluate"]
    return (
        f"Without helper, training is {mean['train'] / whole:.0%} of the time, augmentation "
        f"{mean['augment'] / whole:.0%}, validation {mean['evaluate'] / whole:.0%}. Alone they take "
        f"{mean['train']:.2f}, {mean['augment']:.2f} and {mean['evaluate']:.2f} s per epoch; training beside "
        f"augmentation {mean['train+augment']:.2f} and {mean['made']:.2f} s, beside evaluation "
        f"{mean['train+evaluate']:.2f} and {mean['evaluated']:.2f} s: bounds are from these."
    )


def _goals(result: Mapping[str, Any], limits: Mapping[str, Sequence[float]]) -> Iterator[str]:
    epoch_s: Seconds = result["epoch_s"]
    for name in (n for n in ("mv", "mv-remote") if n in epoch_s and "without" in epoch_s):
        beside = ratio(epoch_s[name], epoch_s["without"])
        yield (
            f"Goal, *{TITLES[name]}* takes at most {MOST_BESIDE_NONE} times as long as no validation at "
            f"all: {beside}: {beside.at_most(MOST_BESIDE_NONE)}."
        )
    for name in (n for n in ("hy", "hy-remote") if n in epoch_s):
        verdict = _of_bound(result, name, limits[name]).at_least(LEAST_OF_BOUND)
        yield f"Goal, *{TITLES[name]}* at least {LEAST_OF_BOUND:.0%} of its bound: {verdict}."
        if result["part"] == "hybrid":
            speed = ratio(epoch_s["none"], epoch_s[name])
            yield (
                f"Goal, *{TITLES[name]}* at least {PUBLISHED_GAIN} times the speed without helper, the "
                f"most that was published: {speed.at_least(PUBLISHED_GAIN)}."
            )


def _equal(told: Mapping[str, Any]) -> str:
    if not told["differ"]:
        return (
            f"Figures of all {told['epochs']} validations are equal bit by bit for "
            f"{', '.join(told['contenders'])}."
        )
    return f"Figures differ in epochs {', '.join(map(str, told['differ']))}: they must not."
