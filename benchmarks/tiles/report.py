"""Results as tables, kept as JSON and shown in README.md between its two markers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import publishing
from contenders import HERE, MEMORY, SPEED
from figures import Median, middle_half, ratio, table

RESULTS = HERE / "results"
SPEED_GOALS = (
    ("tiles", "single", 1.0),
    ("tiles-shared", "single", 1.0),
    ("tiles", "layers", 1.8),
    ("tiles-shared", "layers", 1.8),
    ("tiles", "tiles-never", 0.97),
    ("tiles", "tiles-2", 0.97),
    ("tiles", "tiles-4", 0.97),
)
MEMORY_GOALS = {"1x2": 0.55, "2x2": 0.30}
"""of what one process saves"""
PREDICTION_GOAL = 0.10
"""how far it may be off"""
PLAN_GOALS = {
    ("edsr", "1x2"): 10,
    ("resnet50", "1x2"): 4,
    ("edsr", "2x2"): 2,
    ("resnet50", "2x2"): 2,
}
"""so many times fewer messages"""
PLAN_S_GOAL = 10.0


def keep(result: dict[str, Any], name: str, folder: Path) -> None:
    """Write `name`.json and renew the README that stands beside the folder of published results."""
    publishing.keep(result, name, folder, HERE, renewed)


def renewed(text: str, folder: Path) -> str:
    """The text of the README with the tables of all results in `folder`."""
    kept = publishing.kept(folder)
    order = {
        kind: number for number, kind in enumerate(("throughput", "memory", "prediction", "plans"))
    }
    names = sorted(kept, key=lambda name: (order[kept[name]["benchmark"]], name))
    return publishing.with_sections(text, [section(kept[name]) for name in names])


def section(result: dict[str, Any]) -> str:
    """Heading, tables, goals and conditions of one result."""
    heading, text = {
        "throughput": (_speed_heading, throughput),
        "memory": (_memory_heading, memory),
        "prediction": (_prediction_heading, prediction),
        "plans": (_plans_heading, plans),
    }[result["benchmark"]]
    return f"### {heading(result)}\n\n{text(result)}\n\n{publishing.conditions(result)}"


def _speed_heading(result: dict[str, Any]) -> str:
    features, size = result["features"], f"{result['image']}x{result['image']}"
    wide = f" of {features} features" if features else ""
    return f"Throughput: {result['model']}{wide}, one image of {size}"


def _memory_heading(result: dict[str, Any]) -> str:
    return f"Memory of a rank: one image of {result['image']}x{result['image']}"


def _plans_heading(result: dict[str, Any]) -> str:
    return f"Plans: messages between tiles of {result['tile']}x{result['tile']}"


def throughput(result: dict[str, Any]) -> str:
    """The table of one model, and what it says about the goals."""
    step_s: dict[str, list[float]] = result["step_s"]
    # Two halves of an image at once: one image in the time of one of them.
    ideal = step_s.get("half")
    rows = [_speed_row(f"ideal: {result['ranks']} times half", ideal, step_s)] if ideal else []
    rows += [_speed_row(SPEED[n].title, step_s[n], step_s) for n in step_s if n != "half"]
    text = table(["", "s/image", "middle half", "speed, times single [95 %]", "of the ideal"], rows)
    goals = [
        f"Goal, {_short(one)} at least {goal} times {_short(other)}: {found}: {found.at_least(goal)}."
        for one, other, goal in SPEED_GOALS
        if one in step_s and other in step_s
        for found in [_faster(step_s[one], step_s[other])]
    ]
    return "\n\n".join([text, *goals])


def _short(name: str) -> str:
    return f"*{SPEED[name].title}*"


def _faster(own: Sequence[float], other: Sequence[float]) -> Median:
    """How many times as fast, from times of the same rounds."""
    return ratio(other, own)


def _speed_row(title: str, own: Sequence[float], step_s: dict[str, list[float]]) -> list[str]:
    single, ideal = step_s.get("single"), step_s.get("half")
    digits = 2 if statistics.median(own) >= 1 else 4
    return [
        title,
        f"{statistics.median(own):.{digits}f}",
        middle_half(own, digits),
        "1" if own is single else str(_faster(own, single)) if single else "",
        f"{_faster(own, ideal).value:.0%}" if ideal else "",
    ]


def memory(result: dict[str, Any]) -> str:
    """The table of all models, and what it says about the goals."""
    rows: list[list[str]] = []
    goals: list[str] = []
    for model, found in result["bytes"].items():
        whole = found["whole"]["saved_bytes"]
        for name, told in found.items():
            share = told["saved_bytes"] / whole
            rows.append(
                [
                    f"{model}, {MEMORY[name].title}",
                    *(_mib(told[key]) for key in ("saved_bytes", "peak_bytes")),
                    f"{share:.3f}" if name != "whole" else "1",
                    *(_mib(told[key]) for key in ("at_rest_bytes", "resident_bytes")),
                ]
            )
            if goal := MEMORY_GOALS.get(name):
                said = "met" if share <= goal else "missed"
                goals.append(
                    f"Goal, {model} in {MEMORY[name].title.partition(':')[0]} saves at most {goal:.2f} of "
                    f"one process: {share:.3f}: {said}."
                )
    header = ["MiB", "saved", "most alive", "saved, times one process", "at rest", "most resident"]
    return "\n\n".join([table(header, rows), *goals])


def _prediction_heading(result: dict[str, Any]) -> str:
    return f"Memory predicted: one image of {result['image']}x{result['image']}"


def prediction(result: dict[str, Any]) -> str:
    """Predicted beside measured memory, and what ranks of a large image would need."""
    rows: list[list[str]] = []
    furthest, count = 0.0, 0
    for model, found in result["ranks"].items():
        for name, ranks in found.items():
            cells = [f"{model}, {MEMORY[name].title}"]
            for key in ("saved_bytes", "peak_bytes"):
                ratios = [rank[f"predicted_{key}"] / rank[key] for rank in ranks]
                worst = max(ratios, key=lambda ratio: abs(ratio - 1))
                furthest = max(furthest, abs(worst - 1))
                cells += [
                    _mib(max(rank[of] for rank in ranks), 2) for of in (f"predicted_{key}", key)
                ]
                cells.append(f"{worst:.4f}")
            count += len(ranks)
            rows.append([*cells, f"{max(rank['predict_s'] for rank in ranks):.1f}"])
    header = [
        "MiB", "saved: predicted", "measured", "ratio", "most alive: predicted", "measured", "ratio", "s",
    ]  # fmt: skip
    goal = (
        f"Goal, on {count} ranks predicted within {PREDICTION_GOAL:.0%} of measured: off by {furthest:.2%} "
        f"at most: {'met' if furthest <= PREDICTION_GOAL else 'missed'}."
    )
    return "\n\n".join([table(header, rows), goal, *_large(result["large"])])


def _large(told: dict[str, Any]) -> tuple[str, str]:
    rows = [
        [
            f"{model}, {place}",
            *(f"{found[key] / 2**30:.3f}" for key in ("saved_bytes", "peak_bytes", "total_bytes")),
            f"{found['predict_s']:.1f}",
        ]
        for model, places in told["ranks"].items()
        for place, found in places.items()
    ]
    across, image = told["tiles"], told["image"]
    return (
        f"One image of {image:,} x {image:,} in {across}x{across} tiles, predicted by one process:",
        table(["GiB", "saved", "most alive", "with all that exists before", "s"], rows),
    )


def _mib(size: float, digits: int = 0) -> str:
    return f"{size / 2**20:,.{digits}f}"


def plans(result: dict[str, Any]) -> str:
    """The table of messages, the time to plan, and what they say about the goals."""
    rows: list[list[str]] = []
    goals: list[str] = []
    for row in result["rows"]:
        model, grid = row["model"], "x".join(map(str, row["grid"]))
        never, fused = row["never"], row["fused"]
        fewer = never["messages"] / fused["messages"]
        rows.append(
            [
                f"{model}, {grid}",
                str(never["messages"]),
                str(fused["messages"]),
                f"{fewer:.1f}",
                f"{fused['extra_flops']:.1%}",
                *(f"{told['sent_bytes'] / 2**20:.2f}" for told in (never, fused)),
                str(fused["reductions"]),
                f"{row['latency_s']:.1e}",
            ]
        )
        goal = PLAN_GOALS[model, grid]
        said = "met" if fewer >= goal else "missed"
        goals.append(f"Goal, {model} on {grid} at least {goal} times fewer messages: {said}.")
    header = [
        "", "messages", "fused", "times fewer", "extra FLOPs", "MiB", "MiB fused", "reductions", "latency",
    ]  # fmt: skip
    return "\n\n".join([table(header, rows), *goals, _planning(result)])


def _planning(result: dict[str, Any]) -> str:
    large, found = result["large"], Median.of(result["plan_s"])
    rows, columns = large["grid"]
    return (
        f"To record {large['model']} on an image of {large['image']:,} x {large['image']:,} and plan one of "
        f"{rows * columns} tiles ({rows}x{columns}) takes {found} s. Goal, at most {PLAN_S_GOAL:g} s: "
        f"{found.at_most(PLAN_S_GOAL)}."
    )
