"""Throughput, expected and obtained: what a run reaches of one process times ranks.

    expected = samples per second of one process x ranks
    ratio    = obtained / expected

One process is best measured: in a run of one process with the same configuration. Where nobody measured it,
it is estimated from the run's own ranks, as if one process did the work of all of them and never waited:

    one process ~ samples of a step / (work of all ranks)        work: the step without exposed communication
    ratio       ~ mean work / time of a step

A process that is really alone has caches and memory to itself and nothing to tell others: it is faster, so an
estimated ratio is one that is reached at most.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np

from fivefold.errors import UsageError
from fivefold.introspect.facts import first_told
from fivefold.introspect.numbers import rounded
from fivefold.introspect.run import TracedRun
from fivefold.introspect.shape import Document, OneProcessFrom, Throughput
from fivefold.introspect.steps import Steps

__all__ = ["beside_each_other", "beside_one", "configured_otherwise", "counted_once", "throughput"]

_LOCAL = ("train", "numerics", "loader", "memory")
"""sections of the plan that say what a process computes, not how many share it"""
_LENGTH = ("train.epochs",)


def counted_once(run: TracedRun) -> float:
    """Share of the samples that ranks count which are different ones: stages and tiles share theirs."""
    layout = first_told(run, "layout")
    if not isinstance(layout, dict) or not layout.get("data"):
        return 1.0
    return int(layout["data"]) / math.prod(int(size) for size in layout.values())


class _Alone(NamedTuple):
    """One process."""

    samples_per_s: float | None = None
    known: OneProcessFrom | None = None
    run: str | None = None


def throughput(run: TracedRun, steps: Steps | None) -> Throughput:
    """Samples per second of all ranks, beside one process times ranks: told by the run, or estimated."""
    per_step = float(np.nansum(steps.mean(steps.scalars["samples"]))) if steps else 0.0
    per_step *= counted_once(run) * run.size / len(run.ranks)
    speed = per_step / steps.step_s if steps and per_step and steps.step_s else None
    told = first_told(run, "one_process_samples_per_s")
    alone = _Alone()
    if isinstance(told, int | float):
        alone = _Alone(float(told), "measured")
    elif speed and run.size > 1:
        alone = _estimated(run, steps, per_step)
    return _beside(speed, per_step, run.size, alone)


def _estimated(run: TracedRun, steps: Steps | None, per_step: float) -> _Alone:
    work = float(np.nanmean(steps.mean(steps.work))) * run.size if steps else 0.0
    return _Alone(per_step / work, "estimated") if work else _Alone()


def _beside(speed: float | None, per_step: float, size: int, alone: _Alone) -> Throughput:
    expected = alone.samples_per_s * size if alone.samples_per_s else None
    return {
        "samples_per_s": rounded(speed), "samples_per_step": rounded(per_step) if per_step else None,
        "one_process_samples_per_s": rounded(alone.samples_per_s),
        "one_process_from": alone.known, "one_process_run": alone.run,
        "expected_samples_per_s": rounded(expected),
        "ratio": rounded(speed / expected) if speed and expected else None,
    }  # fmt: skip


def beside_one(of: Document, alone: Document) -> Document:
    """A report with the throughput of one process from the report of such a run.

    What was configured otherwise there is told among the problems. Raises `UsageError` if `alone` cannot say.
    """
    run, path = alone["run"], alone["run"]["path"]
    if run["size"] != 1:
        raise UsageError(
            f"{path} has {run['size']} ranks: what one process does is measured in a run of one, "
            "such as that of `fivefold train RECIPE -n 1`"
        )
    speed = alone["throughput"]["samples_per_s"]
    if not speed:
        raise UsageError(
            f"{path} does not say how many samples a step has: no throughput can be taken from it"
        )
    obtained = of["throughput"]
    made: Any = dict(of)
    made["throughput"] = _beside(
        obtained["samples_per_s"], obtained["samples_per_step"] or 0.0, of["run"]["size"],
        _Alone(speed, "measured", path),
    )  # fmt: skip
    apart = configured_otherwise(of, alone)
    if apart:
        made["problems"] = [
            *of["problems"],
            f"the one process of {path} was configured otherwise: {', '.join(apart[:5])}"
            + (" and more" if len(apart) > 5 else ""),
        ]
    return cast("Document", made)


def beside_each_other(a: Document, b: Document) -> tuple[Document, Document]:
    """Two reports; where one is of one process and the other is not, but is configured alike, that one is
    what the other's throughput is compared with.
    """
    for one, other in ((a, b), (b, a)):
        usable = (
            one["run"]["size"] == 1 < other["run"]["size"] and one["throughput"]["samples_per_s"]
        )
        if usable and not configured_otherwise(one, other):
            found = beside_one(other, one)
            return (a, found) if one is a else (found, b)
    return a, b


def configured_otherwise(a: Document, b: Document) -> list[str]:
    """What makes a process of one run compute something else than one of the other: names of values.

    Of scripts without a plan, their own words of the command line.
    """
    plans = [_local(of) for of in (a, b)]
    found = [key for key in {**plans[0], **plans[1]} if plans[0].get(key) != plans[1].get(key)]
    if not any(plans) and _script(a) != _script(b):
        found.append("the script's command line")
    facts: Any = (a["run"], b["run"])
    return found + [name for name in ("device", "threads") if facts[0][name] != facts[1][name]]


def _local(of: Document) -> dict[str, Any]:
    return {
        row["key"]: row["value"] for row in of["configuration"]["plan"]
        if str(row["key"]).partition(".")[0] in _LOCAL and row["key"] not in _LENGTH
    }  # fmt: skip


def _script(of: Document) -> list[str]:
    """From the first word that is a file of Python on."""
    words = of["run"]["command"]
    begin = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    return words[begin:]
