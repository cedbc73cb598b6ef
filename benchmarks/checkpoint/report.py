"""Tables and goals of checkpoints, out of the kept results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import TITLES
from figures import Median, ratio, table
from publishing import conditions, kept, with_sections

__all__ = ["ORDER", "WAYS_BACK", "cpu_s", "renewed", "section", "stall_s"]

ORDER = ("replicated", "sharded", "recovery")
WAYS_BACK = {
    "none-lost": "fivefold, processes lost, all nodes there",
    "one-lost": "fivefold, one node of four lost, rebuilt by xor",
    "all-lost": "fivefold, all nodes lost, from the shared file system",
    "dcp": "dcp.load from the shared file system",
}
"""how a state comes back, as recovery.py measures it"""
FIXED_S, MTBF_S = 60.0, 3600.0
OURS = ("single", "partner", "xor", "xor-flushed")
LEAST_OVER_RANK0 = 5.0
MOST_OVERHEAD = 0.035

Rounds = Sequence[Mapping[str, Any]]


def stall_s(blocks: Mapping[str, Any]) -> float:
    """Seconds that a checkpoint added: the call, slower steps after it, and what was left at the end.

    A step's own time is the mean of those in the block before, which had no save.
    """
    quiet, saved = blocks["quiet"], blocks["saved"]
    return saved["wall_s"] - quiet["wall_s"] * len(saved["step_s"]) / len(quiet["step_s"])


def cpu_s(blocks: Mapping[str, Any]) -> float:
    """Seconds of processor time that it added, those of helper processes included."""
    quiet, saved = blocks["quiet"], blocks["saved"]
    return saved["cpu_s"] - quiet["cpu_s"] * len(saved["step_s"]) / len(quiet["step_s"])


def overhead(stall: float, interval_s: float) -> float:
    """Share of the time that a stall takes at an interval; what others gain by noise is nothing."""
    return max(stall, 0.0) / interval_s


def at_best(stall: float) -> float:
    """The same at Young's interval, sqrt(2 x stall x MTBF) (CACM 17, 1974)."""
    return math.sqrt(max(stall, 0.0) / (2 * MTBF_S))


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    if result["part"] == "recovery":
        return _recovery(result)
    size = result["state_bytes"] / 1e6
    lines = [
        f"### {result['part']}: {result['nodes']} nodes, {size:.0f} MB of state",
        "",
        _table(result["blocks"]),
        "",
    ]
    for goal in _judged(result["blocks"]):
        lines += [goal, ""]
    for name, why in result["absent"].items():
        lines += [f"Without {TITLES[name]}: {why}.", ""]
    step = statistics.median(b["quiet"]["wall_s"] / result["quiet"] for b in _any(result["blocks"]))
    lines.append(
        f"A step takes {step:.2f} s; the shared file system passes "
        f"{result['throttle_bytes_per_s'] / 1e6:.0f} MB/s. {conditions(result)}"
    )
    return "\n".join(lines)


def _recovery(result: dict[str, Any]) -> str:
    seconds: dict[str, list[float]] = result["seconds"]
    rows = [
        [WAYS_BACK[way], str(Median.of(own)), str(ratio(own, seconds["dcp"]))]
        for way, own in seconds.items()
    ]
    size = result["state_bytes"] / 1e6
    return "\n\n".join([
        f"### recovery: {result['nodes']} nodes, {size:.0f} MB of state",
        table(["", "seconds [95 %]", "times dcp.load"], rows),
        conditions(result),
    ])  # fmt: skip


def _any(blocks: Mapping[str, Rounds]) -> Rounds:
    return blocks["none"] if "none" in blocks else next(iter(blocks.values()))


def _table(blocks: Mapping[str, Rounds]) -> str:
    header = [
        "", "stall, s [95 %]", "of it the call, s", "CPU, s",
        f"overhead every {FIXED_S:.0f} s", f"at Young's interval, MTBF {MTBF_S / 3600:.0f} h",
        "rank 0 takes times as long",
    ]  # fmt: skip
    stalls = {name: [stall_s(b) for b in rounds] for name, rounds in blocks.items()}
    rows: list[list[str]] = []
    for name, rounds in blocks.items():
        stall = Median.of(stalls[name])
        rows.append([
            TITLES[name],
            str(stall),
            f"{statistics.median(b['saved']['call_s'] for b in rounds):.3f}",
            f"{statistics.median(cpu_s(b) for b in rounds):.2f}",
            f"{overhead(stall.value, FIXED_S):.2%}",
            f"{at_best(stall.value):.2%}",
            _times(stalls, name),
        ])  # fmt: skip
    return table(header, rows)


def _times(stalls: Mapping[str, Sequence[float]], name: str) -> str:
    if name in ("none", "rank0") or "rank0" not in stalls:
        return ""
    if min(stalls[name]) <= 0.0:
        return "(some rounds show no stall)"
    return str(ratio(stalls["rank0"], stalls[name]))


def _judged(blocks: Mapping[str, Rounds]) -> Iterator[str]:
    stalls = {name: [stall_s(b) for b in rounds] for name, rounds in blocks.items()}
    others = [name for name in stalls if name not in OURS and name not in ("none", "rank0")]
    for name in (name for name in OURS if name in stalls):
        if "rank0" in stalls:
            # The difference, not the ratio: a stall may be nothing.
            spare = [
                r - LEAST_OVER_RANK0 * s for r, s in zip(stalls["rank0"], stalls[name], strict=True)
            ]
            verdict = Median.of(spare).at_least(0.0)
            yield f"Goal, {TITLES[name]} stalls at most a fifth of rank 0: {verdict}."
        if others:
            best = [min(values) for values in zip(*(stalls[o] for o in others), strict=True)]
            more = Median.of([s - b for s, b in zip(stalls[name], best, strict=True)])
            yield (
                f"Goal, {TITLES[name]} stalls no longer than the best of the others in each round, "
                f"seconds more: {more}: {more.at_most(0.0)}."
            )
    if "xor" in stalls:
        most = Median.of([at_best(s) for s in stalls["xor"]])
        yield (
            f"Goal, overhead of xor at Young's interval at most {MOST_OVERHEAD:.1%}: "
            f"{most.value:.2%}: {most.at_most(MOST_OVERHEAD)}."
        )


def renewed(readme: str, folder: Path) -> str:
    """The README with the figures of all kept parts."""
    results = kept(folder)
    return with_sections(readme, [section(results[name]) for name in ORDER if name in results])
