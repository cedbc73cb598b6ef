"""Results as tables, kept as JSON and shown in README.md between its two markers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import publishing
from contenders import HERE, KINDS
from figures import middle_half, ratio, table
from publishing import conditions

RESULTS = HERE / "results"
GOALS = (("replica", "ddp", 0.98), ("replica", "ddp-heap", 0.98), ("exact-shared", "ddp", 1.0))
"""a contender, at least so many times as fast as another"""
STARTUP_GOAL = 1.15
FIRST = ("fp32", "fp32-channels_last", "bf16-channels_last")
"""the order of the sections; others follow by name, start-up comes last"""


def keep(result: dict[str, Any], name: str, folder: Path) -> None:
    """Write `name`.json and renew the README that stands beside the folder of published results."""
    publishing.keep(result, name, folder, HERE, renewed)


def renewed(text: str, folder: Path) -> str:
    """The text of the README with the tables of all results in `folder`."""
    kept = publishing.kept(folder)
    others = sorted(kept.keys() - {*FIRST, "startup"})
    sections = [_section(kept[name]) for name in (*FIRST, *others, "startup") if name in kept]
    return publishing.with_sections(text, sections)


def _section(result: dict[str, Any]) -> str:
    if result["benchmark"] == "startup":
        return f"### Start-up\n\n{startup(result)}\n\n{conditions(result)}"
    return f"### {heading(result)}\n\n{throughput(result)}\n\n{conditions(result)}"


def heading(result: dict[str, Any]) -> str:
    """What was trained, and how."""
    size = f"{result['image']}x{result['image']}"
    where = "" if result["environment"]["device"] == "cpu" else "GPU, "
    return f"{where}{result['variant']}: {result['model']}, {size}, batch {result['batch']}"


def throughput(result: dict[str, Any]) -> str:
    """The table of one variant, and what it says about the goal."""
    rates: dict[str, list[float]] = result["images_per_s"]
    ideal = [result["ranks"] * rate for rate in rates["alone"]] if "alone" in rates else None
    rows: list[list[str]] = []
    if ideal:
        rows.append(_row(f"ideal: {result['ranks']} times one process alone", ideal, rates, ideal))
    rows += [_row(KINDS[n].title, rates[n], rates, ideal) for n in rates if n != "alone"]
    text = table(["", "images/s", "middle half", "times DDP [95 %]", "of the ideal"], rows)
    goals = [
        f"Goal, {KINDS[name].title} at least {goal} of {KINDS[baseline].title}: "
        f"{ratio(rates[name], rates[baseline]).at_least(goal)}."
        for name, baseline, goal in GOALS
        if {name, baseline} <= rates.keys()
    ]
    return "\n\n".join([text, *goals])


def _row(
    title: str, own: Sequence[float], rates: dict[str, list[float]], ideal: Sequence[float] | None
) -> list[str]:
    over_ddp = str(ratio(own, rates["ddp"])) if "ddp" in rates else ""
    return [
        title,
        f"{statistics.median(own):.0f}",
        middle_half(own),
        "1" if own is rates.get("ddp") else over_ddp,
        f"{ratio(own, ideal).value:.0%}" if ideal else "",
    ]


def startup(result: dict[str, Any]) -> str:
    """The table of start-up times, and what it says about the goal."""
    wall_s: dict[str, list[float]] = result["wall_s"]
    rows: list[list[str]] = []
    for title, own in wall_s.items():
        over = "1" if title == "torchrun" else str(ratio(own, wall_s["torchrun"]))
        rows.append([title, f"{statistics.median(own):.2f}", middle_half(own, 2), over])
    ours = ratio(wall_s["fivefold run"], wall_s["torchrun"])
    said = ours.at_most(STARTUP_GOAL)
    text = table(["", "seconds", "middle half", "times torchrun [95 %]"], rows)
    return f"{text}\n\nGoal, at most {STARTUP_GOAL} of torchrun: {said}."
