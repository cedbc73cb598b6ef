"""A training step within a part of its memory: a budget, and what users do by hand.

    PYTHONPATH=tests python benchmarks/memory/run.py [--parts resnet50,unet] [--rounds 7]

All ways take turns in one process. Its control group leaves next to no page cache to the one that writes
through it. Memory is counted from outside, see `benchmarks/tiles/live.py`: the most that a step makes, for
each way alike. The parts NET-alternatives measure 20 other choices that fit; `decided`, how long it takes
to decide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from contender import leave_properly
from figures import Median, environment, middle_half, ratio, table
from group import MemoryGroup, memory_group
from publishing import Page, conditions
from rounds import undisturbed
from ways import CASES, SAME, Budgeted, Step, alternatives, decided_s, peak_bytes, steps

HERE = Path(__file__).resolve().parent
PARTS = (0.6, 0.4, 0.25)
AT, OTHERS = 0.4, 20
"""the part at which alternatives are measured, and how many"""
FREE, OURS, SPILLS = "no budget", "memory.budget", "memory.budget, with a disk"
CACHED = "everything to disk by hooks"
ALTERNATIVES = "-alternatives"
SIZE = 16384
"""pixels of a side"""


def measured(part: str, rounds: int, group: MemoryGroup) -> dict[str, Any]:
    """One part."""
    before, found, others = environment(), dict[str, Any](), dict[str, Any]()
    if part == "decided":
        found = {"seconds": [decided_s(SIZE) for _ in range(rounds)]}
    elif part.endswith(ALTERNATIVES):
        found, others = _alternatives(part.removesuffix(ALTERNATIVES), rounds, group)
    else:
        for share in PARTS:
            found[str(share)], others = _compared(part, share, rounds, group)
    return {
        "benchmark": "memory",
        "part": part,
        "rounds": rounds,
        "found": found,
        "environment": {**before, "torch": torch.__version__, "disturbed_rounds": 0, **others},
    }


def _compared(
    net: str, share: float, rounds: int, group: MemoryGroup
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ways, at a part of the memory that a step takes."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-", dir=Path.cwd()) as folder:
        ways, refused = steps(net, share, Path(folder))
        found, others = _in_turn(ways, rounds, net, f"{net} {share}", group)
        return {**found, "refused": refused}, others


def _alternatives(
    net: str, rounds: int, group: MemoryGroup
) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-", dir=Path.cwd()) as folder:
        ways = alternatives(net, AT, Path(folder), OTHERS)
        found, others = _in_turn(ways, rounds, net, f"{net}, others", group)
        return {"seconds": found["seconds"]}, others


def _in_turn(
    ways: Mapping[str, Step], rounds: int, net: str, what: str, group: MemoryGroup
) -> tuple[dict[str, Any], dict[str, Any]]:
    own = psutil.Process()
    peaks = {name: peak_bytes(step) for name, step in ways.items()}

    cached = ways.get(CACHED)
    needed = (0, 0) if cached is None else group.needed(cached)

    def seconds(step: Step) -> float:
        if step is not cached:
            return _seconds(step)
        with group.limited(needed, CASES[net].cache_bytes):
            step()  # takes anew what the allocator had kept
            taken = _seconds(step)
        ways[FREE]()  # so does this one, for those that follow
        return taken

    answers, bystanders = undisturbed(
        ways, rounds, seconds, lambda done, _: f"{what} {done}/{rounds}",
        lambda: sum(own.cpu_times()[:2]),
    )  # fmt: skip
    told = {name: way.told() for name, way in ways.items() if isinstance(way, Budgeted)}
    limit = f"{CASES[net].cache_bytes >> 20} MiB of page cache for the hooks"
    if group.limit_file is None:
        limit = "No limit on memory: the page cache stands in for the disk"
    found = {"seconds": answers, "peak_bytes": peaks, "told": told, "limit": limit}
    return found, bystanders.told()


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def section(result: dict[str, Any]) -> str:
    """A table of one part."""
    part, found = result["part"], result["found"]
    if part == "decided":
        title, rows = f"Deciding for ResNet-50, one image of {SIZE:,} x {SIZE:,}", _decided(found)
        header: tuple[str, ...] = ("", "seconds, median", "middle half")
    elif part.endswith(ALTERNATIVES):
        net = part.removesuffix(ALTERNATIVES)
        title = f"{net}: {OTHERS} other choices that fit into {AT:g} of the memory, with a disk"
        header = (
            "of the choice made, the fastest of them", "the median of them", "itself once more",
        )  # fmt: skip
        rows = [_best(found["seconds"])]
    else:
        title, rows = f"{part}, {CASES[part].shape}", _ways(found)
        header = (
            "part", "way", "seconds, median", "middle half", "of no budget", "of the best that fits",
            "of its bound", "peak, MiB", "fits", "predicted, MiB", "predicted, s", "predicted, of no budget",
        )  # fmt: skip
    limits = {one["limit"] for one in found.values() if part in CASES}
    last = " ".join([*(f"{limit}." for limit in sorted(limits)), conditions(result)])
    return f"### {title}\n\n{table(header, rows)}\n\n{last}"


def _decided(found: dict[str, Any]) -> list[tuple[str, ...]]:
    seconds = found["seconds"]
    return [("memory(x, y)", f"{statistics.median(seconds):.2f}", middle_half(seconds, 2))]


def _best(seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """Each of the others beside the choice that was made, round by round; and that beside itself."""
    ratios = {name: ratio(own, seconds[SPILLS]) for name, own in seconds.items() if name != SPILLS}
    same = str(ratios.pop(SAME)) if SAME in ratios else ""
    fastest = min(ratios.values(), key=lambda one: one.value)
    return str(fastest), f"{statistics.median(one.value for one in ratios.values()):.3f}", same


def _ways(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for share, one in found.items():
        free = one["peak_bytes"][FREE]
        fits = {
            way: peak <= float(share) * free
            for way, peak in one["peak_bytes"].items()
            if way != FREE
        }
        by_hand = [way for way, is_so in fits.items() if is_so and way not in (OURS, SPILLS)]
        medians = {way: statistics.median(one["seconds"][way]) for way in by_hand}
        best = min(medians, key=lambda way: medians[way], default=None)
        for way, seconds in one["seconds"].items():
            told = one["told"].get(way, {})
            rows.append((
                share, way, f"{statistics.median(seconds):.2f}", middle_half(seconds, 2),
                str(ratio(seconds, one["seconds"][FREE])),
                "" if best is None or way not in fits else str(ratio(seconds, one["seconds"][best])),
                _of_bound(seconds, told),
                _mib(one["peak_bytes"][way]),
                "" if way == FREE else "yes" if fits[way] else "no",
                _mib(told["peak_bytes"]) if told else "", f"{told['step_s']:.2f}" if told else "",
                f"{told['step_s'] / told['free_s']:.3f}" if told else "",
            ))  # fmt: skip
        rows += [(share, way, f"refused: {why}", *("",) * 9) for way, why in one["refused"].items()]
    return rows


def _of_bound(seconds: list[float], told: dict[str, float]) -> str:
    return str(Median.of([s / told["bound_s"] for s in seconds])) if told else ""


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.0f}"


PAGE = Page(HERE, section, (*CASES, *(net + ALTERNATIVES for net in CASES), "decided"))


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PAGE.order), help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if strange := [part for part in parts if part not in PAGE.order]:
        parser.error(f"there is no part {strange[0]}; valid: {', '.join(PAGE.order)}")
    with leave_properly(), memory_group() as group:
        return PAGE.publish(parts, lambda part: measured(part, asked.rounds, group), asked.results)


if __name__ == "__main__":
    sys.exit(main())
