"""Results as tables, kept as JSON and shown in README.md between its two markers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import publishing
from contenders import HERE, KINDS
from figures import Median, middle_half, ratio, table

RESULTS = HERE / "results"
ORDER = ("torch", "pairs", "headline", "memory")
PROMISED = 0.95
"""of what the simulation says"""
PUBLISHED = "2.67 over layer, 1.68 over pipelines and 1.47 over basic spatial parallelism"


def keep(result: dict[str, Any], name: str, folder: Path) -> None:
    """Write `name`.json and renew the README that stands beside the folder of published results."""
    publishing.keep(result, name, folder, HERE, renewed)


def renewed(text: str, folder: Path) -> str:
    """The text of the README with the tables of all results in `folder`."""
    kept = publishing.kept(folder)
    names = sorted(kept, key=lambda name: (ORDER.index(kept[name]["benchmark"]), name))
    return publishing.with_sections(text, [section(kept[name]) for name in names])


def section(result: dict[str, Any]) -> str:
    """Heading, tables, goals and conditions of one result."""
    heading, text = {
        "torch": ("Two stages, beside torch.distributed.pipelining", beside_torch),
        "pairs": ("Two directions, four stages on two cores", pairs),
        "headline": ("Two ranks, large images", headline),
        "memory": ("Micro-batches alive at once, four ranks", memory),
    }[result["benchmark"]]
    told = publishing.conditions(result)
    return f"### {heading}: {_work(result['work'])}\n\n{text(result)}\n\n{told}"


def _work(work: dict[str, Any]) -> str:
    options = "".join(f", {name} {value}" for name, value in work["options"].items())
    images = f"{work['samples']} of {work['image']}x{work['image']}"
    return f"{work['model']}{options}, {work['micro_batches']} micro-batches of {images}"


def _title(name: str) -> str:
    return KINDS[name].title


def _faster(own: Sequence[float], other: Sequence[float]) -> Median:
    """How many times as fast, from times of the same rounds."""
    return ratio(other, own)


def _goal(own: str, what: str, found: Median, goal: float) -> str:
    return f"Goal, *{_title(own)}* at least {goal:g} {what}: {found}: {found.at_least(goal)}."


def beside_torch(result: dict[str, Any]) -> str:
    """Times, their ratio to torch's, and the part of what the schedule promises."""
    step_s, ideal_s = result["step_s"], result["ideal_s"]
    rows: list[list[str]] = []
    goals: list[str] = []
    for name, own in step_s.items():
        ours = name.removeprefix("torch-").split("-", maxsplit=1)[0]
        theirs, ideal = step_s[f"torch-{ours}"], ideal_s[f"{ours}-2"]
        speed, share = _faster(own, theirs), _faster(own, ideal)
        shown = "1" if own is theirs else str(speed)
        rows.append(
            [_title(name), *_seconds(own), shown, f"{statistics.median(ideal):.3f}", str(share)]
        )
        if own is not theirs:
            goals += [
                _goal(name, f"times *{_title(f'torch-{ours}')}*", speed, 1.0),
                _goal(name, "of the ideal", share, PROMISED),
            ]  # fmt: skip
    header = [
        "", "s/step", "middle half", "speed, times torch [95 %]", "ideal s/step", "of the ideal [95 %]",
    ]  # fmt: skip
    return "\n\n".join([table(header, rows), _stage_table(result), *goals])


def _seconds(own: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(own):.3f}", middle_half(own, 3)


def _stage_table(result: dict[str, Any]) -> str:
    """Seconds of every stage, medians of the rounds."""
    (rounds,) = result["stages"].values()

    def median(rank: int, key: str, number: int) -> str:
        values = [ranks[rank][key] for ranks in rounds]
        if any(value is None for value in values):
            return "-"
        return f"{statistics.median(value[number] for value in values):.4f}"

    rows = [
        [str(rank), *(median(rank, key, n) for key in ("alone_s", "busy_s") for n in (0, 1))]
        for rank in range(len(rounds[0]))
    ]
    header = ["stage, s", "F alone", "B alone", "F, both cores busy", "B, both cores busy"]
    return table(header, rows)


def pairs(result: dict[str, Any]) -> str:
    """Gains over `layer`, simulated and measured, with what they cost in memory."""
    step_s, ideal_s = result["step_s"], result["ideal_s"]
    rows: list[list[str]] = []
    goals: list[str] = []
    for name, own in step_s.items():
        gain, promised = (_faster(times[name], times["layer-4"]) for times in (step_s, ideal_s))
        share = Median.of(
            [
                (layer / mine) / (layer_ideal / ideal)
                for layer, mine, layer_ideal, ideal in zip(
                    step_s["layer-4"], own, ideal_s["layer-4"], ideal_s[name], strict=True
                )
            ]
        )
        first = name == "layer-4"
        rows.append(
            [_title(name), *_seconds(own), "1" if first else str(gain), f"{promised.value:.3f}",
             "" if first else str(share), str(result["most_at_once"][name])]
        )  # fmt: skip
        if name.startswith("gems"):
            goals.append(_goal(name, "of the simulated gain", share, PROMISED))
    header = [
        "", "s/step", "middle half", "gain over layer [95 %]", "simulated", "of the simulated [95 %]",
        "ranks at once",
    ]  # fmt: skip
    tables = [table(header, rows), _memory_table(result), _stage_table(result)]
    return "\n\n".join([*tables, *goals])


def _memory_table(result: dict[str, Any]) -> str:
    """Activations of every rank, and the rest of all ranks together."""
    rows: list[list[str]] = []
    for name, ranks in result["memory"].items():
        each = (
            " ".join(f"{rank[key] / 2**20:.0f}" for rank in ranks)
            for key in ("saved_bytes", "peak_bytes")
        )
        totals = (
            _mib(sum(rank[key] for rank in ranks))
            for key in ("parameter_bytes", "gradient_bytes", "optimiser_bytes")
        )
        rows.append([_title(name), *each, *totals])
    header = [
        "MiB", "saved, by rank", "most alive, by rank", "parameters of all", "gradients", "optimiser",
    ]  # fmt: skip
    return table(header, rows)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f}"


def headline(result: dict[str, Any]) -> str:
    """Times under a cap, the best of those that fit, and its gain over the others beside the bounds."""
    step_s, cap = result["step_s"], result["cap_bytes"]
    fits = {
        name: max(rank["peak_bytes"] for rank in ranks) <= cap
        for name, ranks in result["memory"].items()
    }
    rows = [
        [
            _title(name), *_seconds(own), "1" if name == "layer-2" else str(_faster(own, step_s["layer-2"])),
            "yes" if fits[name] else "no",
        ]
        for name, own in step_s.items()
    ]  # fmt: skip
    header = ["", "s/step", "middle half", "speed, times layer [95 %]", f"within {_mib(cap)} MiB"]
    tables = [table(header, rows), _memory_table(result)]
    able = [name for name in step_s if fits[name]]
    if not able:
        return "\n\n".join([*tables, "Nothing fits: make the image smaller or the cap larger."])
    best = min(able, key=lambda name: statistics.median(step_s[name]))
    micros = result["work"]["micro_batches"]
    bounds = {"layer-2": 2.0, "1f1b-2": (micros + 1) / micros}
    gains = [
        f"*{_title(best)}* is {_faster(step_s[best], own)} times as fast as *{_title(name)}*"
        + (f"; two ranks can be at most {bounds[name]:g} times" if name in bounds else "")
        + "."
        for name, own in step_s.items()
        if name != best
    ]
    orientation = f"For orientation only, published for many GPUs: up to {PUBLISHED}."
    return "\n\n".join([*tables, *gains, orientation])


def memory(result: dict[str, Any]) -> str:
    """Counts that the simulator gives, and what is alive, in micro-batches of one stage."""
    rows: list[list[str]] = []
    for name, told in result["found"].items():
        counts, promised = told["predicted"], told["predicted_bytes"]
        more = [own / size for own, size in zip(told["saved_bytes"], promised, strict=True)]
        measured = [f"{count * times:.2f}" for count, times in zip(counts, more, strict=True)]
        rows.append(
            [name, " ".join(map(str, counts)), " ".join(measured), f"{max(more) - 1:+.1%}",
             _mib(max(told["saved_bytes"]))]
        )  # fmt: skip
    header = [
        "",
        "simulated, ranks 0 to 3",
        "measured",
        "more than simulated",
        "MiB, most of a rank",
    ]
    return table(header, rows)
