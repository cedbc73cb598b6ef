"""Tables and goals of checkpoints, out of the kept results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import epochs_report
from contenders import HERE, TITLES
from costs import FIXED_S, MTBF_S, Cost, Rounds, call_s, costs
from figures import Median, ratio, table
from publishing import Page, conditions

__all__ = ["ORDER", "PAGE", "WAYS_BACK", "section"]

ORDER = ("replicated", "sharded", "recovery", *epochs_report.PARTS, "encode")
WAYS_BACK = {
    "none-lost": "fivefold, processes lost, all nodes there",
    "one-lost": "fivefold, one node of four lost, rebuilt by xor",
    "all-lost": "fivefold, all nodes lost, from the shared file system",
    "dcp": "dcp.load from the shared file system",
}
"""how a state comes back, as recovery.py measures it"""
ENCODING = {
    "copy": "memory copy",
    "xor": "xor, parity",
    "rs": "rs, P and Q",
    "xor-rebuild": "xor, one lost member",
    "rs-rebuild": "rs, one of two lost members",
}
"""what a core computes, as encode.py measures it"""
OURS = ("single", "partner", "xor", "xor-flushed")
COMPUTED = {"xor-tenth": "fivefold, xor, every tenth flushed (computed)"}
NAMES = {**TITLES, **COMPUTED}
LEAST_OVER_RANK0 = 5.0
LEAST_GB_PER_S = 5.0
MOST_OVERHEAD, WANTED_OVERHEAD = 0.035, 0.01


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    if result["part"] == "recovery":
        return _recovery(result)
    if result["part"] == "encode":
        return _encode(result)
    if result["part"] in epochs_report.PARTS:
        return epochs_report.section(result)
    found = costs(result["blocks"], result["environment"]["cores"])
    size = result["state_bytes"] / 1e6
    lines = [
        f"### {result['part']}: {result['nodes']} nodes, {size:.0f} MB of state",
        "",
        _table(result["blocks"], found),
        "",
    ]
    for goal in _judged(found):
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


def _encode(result: dict[str, Any]) -> str:
    speeds: dict[str, list[float]] = result["gb_per_s"]
    rows = [
        [ENCODING[way], str(Median.of(own)), str(ratio(own, speeds["copy"]))]
        for way, own in speeds.items()
    ]
    met = Median.of(speeds["rs"]).at_least(LEAST_GB_PER_S)
    return "\n\n".join([
        f"### encode: {result['members']} members with {result['mb']} MB each, one core",
        table(["", "GB/s read [95 %]", "times memory copy"], rows),
        f"Goal, rs encodes {LEAST_GB_PER_S:.0f} GB/s or more per core: {met}.",
        f"numpy {result['numpy']}. {conditions(result)}",
    ])  # fmt: skip


def _any(blocks: Mapping[str, Rounds]) -> Rounds:
    return blocks["none"] if "none" in blocks else next(iter(blocks.values()))


def _table(blocks: Mapping[str, Rounds], found: Mapping[str, Sequence[Cost]]) -> str:
    hours = f"MTBF {MTBF_S / 3600:.0f} h"
    header = [
        "", "stall, s [95 %]", "of it the call, s", "CPU, s",
        f"every {FIXED_S:.0f} s, by the clock", "by the processor",
        f"Young's interval, {hours}, s", "by the clock", "by the processor",
        "rank 0 takes times as long",
    ]  # fmt: skip
    rows: list[list[str]] = []
    for name, rounds in found.items():
        stall = Median.of([one.stall_s for one in rounds])
        cpu_s = statistics.median(one.cpu_s for one in rounds)
        typical = Cost(stall.value, cpu_s, rounds[0].cores)
        rows.append([
            NAMES[name],
            str(stall),
            f"{call_s(blocks[name]):.3f}" if name in blocks else "",
            f"{cpu_s:.2f}",
            *_shares(typical, FIXED_S),
            f"{typical.interval_s():.0f}" if name != "none" else "",
            *(_shares(typical, typical.interval_s()) if name != "none" else ("", "")),
            _times(found, name),
        ])  # fmt: skip
    return table(header, rows)


def _shares(cost: Cost, interval_s: float) -> tuple[str, str]:
    """Overhead by the clock and by the processor; what others gain by noise is nothing."""
    if not interval_s:
        return "0.00%", "0.00%"
    by_the_clock, by_the_processor = max(cost.stall_s, 0.0), max(cost.processor_s, 0.0)
    return f"{by_the_clock / interval_s:.2%}", f"{by_the_processor / interval_s:.2%}"


def _times(found: Mapping[str, Sequence[Cost]], name: str) -> str:
    if name in ("none", "rank0") or "rank0" not in found:
        return ""
    own = [one.stall_s for one in found[name]]
    if min(own) <= 0.0:
        return "(some rounds show no stall)"
    return str(ratio([one.stall_s for one in found["rank0"]], own))


def _judged(found: Mapping[str, Sequence[Cost]]) -> Iterator[str]:
    stalls = {name: [one.stall_s for one in rounds] for name, rounds in found.items()}
    ours = (*OURS, *COMPUTED)
    others = [name for name in stalls if name not in (*ours, "none", "rank0")]
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
    for name in (name for name in ("xor", "xor-tenth") if name in found):
        most = Median.of([one.at_best() for one in found[name]])
        yield (
            f"Goal, overhead of {NAMES[name]} at Young's interval, by the clock or by the "
            f"processor, whichever is more, at most {MOST_OVERHEAD:.1%}: {most.value:.2%} "
            f"[{most.low:.2%}, {most.high:.2%}]: {most.at_most(MOST_OVERHEAD)}; at most "
            f"{WANTED_OVERHEAD:.0%}: {most.at_most(WANTED_OVERHEAD)}."
        )


PAGE = Page(HERE, section, ORDER)
