"""Tables and goals of recording and of reports, out of the kept results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import Median, ratio, table
from publishing import Page, conditions

__all__ = ["CONTENDERS", "HERE", "PAGE", "STATES", "TIMES", "WAYS"]

HERE = Path(__file__).resolve().parent
ORDER = ("overhead-operations", "overhead-steps", "scale")
GOAL_SHARE, GOAL_US = 1.01, 0.5
GOAL_S, GOAL_OPEN_S, GOAL_BYTES = 5.0, 3.0, 10_000_000
CONTENDERS = {"fivefold": "Fivefold", "ddp": "DistributedDataParallel, gloo"}
STATES = {
    "plain": "",
    "recorded": "recorded",
    "watched": "recorded, with the share of the thread that watches added",
    "profiled": "under torch.profiler",
}
WAYS = {
    "trace": "Trace.issue and Trace.ended alone, adding up included",
    "fold": "of it, adding up",
    "span": "a span of a phase alone",
    "step": "Trace.step_ended with 20 operations, those not counted",
    "gloo": "all_reduce of 4 bytes, gloo as torch makes it",
    "gloo-passed": "the same through the group that passes on, nothing recorded",
    "gloo-recorded": "the same, recorded",
    "fivefold": "all_reduce of 4 bytes, fivefold",
    "fivefold-recorded": "the same, recorded",
}
TIMES = {"read": "traces are read", "judge": "judged", "page": "made a page"}
"""what of a report takes time"""


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    if result["benchmark"] == "overhead-operations":
        title, body = "Per operation", _operations(result["us"])
    elif result["benchmark"] == "overhead-steps":
        title = "Steps of ResNet-20, 64 images of 32 pixels, two ranks"
        body = _steps(result["step_ms"])
    else:
        title, body = f"Reports of {result['ranks']:,} ranks", _scale(result)
    return f"### {title}\n\n{body}\n\n{conditions(result)}"


def _operations(us: dict[str, list[float]]) -> str:
    base = {"gloo-passed": "gloo", "gloo-recorded": "gloo", "fivefold-recorded": "fivefold"}
    rows: list[list[str]] = []
    for way, found in us.items():
        more = ""
        if way in base:
            added = [own - plain for own, plain in zip(found, us[base[way]], strict=True)]
            more = _interval(added)
        rows.append([WAYS[way], _interval(found), more])
    goal, whole = Median.of(us["fold"]).at_most(GOAL_US), Median.of(us["trace"]).at_most(GOAL_US)
    return "\n\n".join([
        table(["", "us [95 %]", "more than without, us [95 %]"], rows),
        f"Goal, adding up at most {GOAL_US} us for an operation: {goal}; recording it as well: {whole}.",
    ])  # fmt: skip


def _interval(values: Sequence[float]) -> str:
    found = Median.of(values)
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _steps(step_ms: dict[str, dict[str, list[float]]]) -> str:
    rows: list[list[str]] = []
    goals: list[str] = []
    for name, states in step_ms.items():
        for state, found in states.items():
            title = CONTENDERS[name] + (f", {STATES[state]}" if STATES[state] else "")
            over = ratio(found, states["plain"])
            told = "" if state == "plain" else f"{over.value:.4f} [{over.low:.4f}, {over.high:.4f}]"
            rows.append([title, f"{statistics.median(found):.2f}", told])
            if state == "watched":
                said = over.at_most(GOAL_SHARE)
                goals.append(f"Goal, {title}, at most {GOAL_SHARE} of without: {said}.")
    return "\n\n".join([table(["", "ms", "times without [95 %]"], rows), *goals])


def _scale(result: dict[str, Any]) -> str:
    seconds: dict[str, list[float]] = result["seconds"]
    whole = [sum(parts) for parts in zip(*(seconds[name] for name in TIMES), strict=True)]
    opened = Median.of(seconds["open"])
    rows = [[title, str(Median.of(seconds[name]))] for name, title in TIMES.items()]
    rows += [["in all", str(Median.of(whole))], ["the page is opened in Chromium", str(opened)]]
    sizes = (
        f"{result['steps']} steps each, {result['trace_bytes'] / 1e6:,.0f} MB of traces; the report as JSON "
        f"has {result['json_bytes'] / 1e6:.1f} MB, the page {result['page_bytes'] / 1e6:.1f} MB. "
        f"It says: {result['verdict']}"
    )
    small = "met" if result["page_bytes"] < GOAL_BYTES else "missed"
    goals = (
        f"Goal, at most {GOAL_S:.0f} s in all: {Median.of(whole).at_most(GOAL_S)}; "
        f"a page that opens within {GOAL_OPEN_S:.0f} s: {opened.at_most(GOAL_OPEN_S)}; "
        f"a page of less than {GOAL_BYTES / 1e6:.0f} MB: {small}."
    )
    return "\n\n".join([table(["", "seconds [95 %]"], rows), sizes, goals])


PAGE = Page(HERE, section, ORDER)
