"""Training steps on images by turns, beside the same steps on the image in one piece.

    python benchmarks/any-size/run.py [--parts edsr,resnet50] [--disk DIR]

Every step is made in a process of its own, after one on a small image. Where an image fits in one piece, both
ways take turns; then one step is made on each of the images that are larger than any piece.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import Median, environment, ratio, table
from publishing import Page, conditions
from resident import resident
from rounds import order

import fivefold as ff
from fivefold.recipes import models

HERE = Path(__file__).resolve().parent
MIB = 2**20
SMALL = 128
"""pixels of the image before, which loads what is loaded once"""
PLANNED = 1024
"""pixels of an edge up to which a step is made before: plans are made once for a size"""


@dataclass(frozen=True)
class Large:
    """An image that is computed once, by turns."""

    pixels: int
    """of an edge"""
    turns: int
    """along each edge"""
    budget: str = ""
    """of the whole step, with the image and the target; a disk takes the rest"""

    @property
    def way(self) -> str:
        """In words."""
        budget = f", budget {self.budget}, a disk" if self.budget else ""
        return f"{self.turns} x {self.turns} turns{budget}"


@dataclass(frozen=True)
class Part:
    """A net, and the sizes of its images."""

    net: str
    pair: int
    """pixels of an edge, where both ways are timed"""
    pair_turns: int
    """along each edge"""
    piece: int
    """the largest that is computed in one piece"""
    large: tuple[Large, ...]
    pair_budget: str = ""
    """within which turns are timed too"""

    @property
    def ways(self) -> dict[str, tuple[int, str]]:
        """Of pairs, the first of which the others are compared with: turns along each edge, and a budget."""
        turns = f"{self.pair_turns} x {self.pair_turns} turns"
        found = {"in one piece": (1, ""), turns: (self.pair_turns, "")}
        if self.pair_budget:
            found[f"{turns}, budget {self.pair_budget}"] = self.pair_turns, self.pair_budget
        return found


PARTS = {
    "edsr": Part(
        "edsr_small", 512, 2, 1024, (Large(4096, 8, "3900MiB"), Large(8192, 16, "6800MiB"))
    ),
    "resnet50": Part("resnet50", 1024, 2, 1024, (Large(4096, 8, "1GiB"),), "1700MiB"),
    "tiny": Part("resnet50", 192, 2, 192, (Large(256, 2),), "600MiB"),
}
"""the last one tries the script"""


# ---- in a process of its own


def one(net: str, pixels: int, turns: int, budget: str, disk: str) -> dict[str, Any]:
    """Seconds of a step, and the most bytes of memory that it took beyond what was there."""
    torch.manual_seed(0)
    made = models.build(net, 10)
    picture = models.returns(net) == "picture"
    loss: nn.Module = nn.L1Loss() if picture else nn.CrossEntropyLoss()
    told = f'tiles.turns = "height={turns},width={turns}"\n' if turns > 1 else ""
    told += f'memory.budget = "{budget}"\nmemory.disk = "{disk}"\n' if budget else ""
    with ff.start(ff.Plan.parse(told)) as mesh:
        model = ff.parallelize(made, mesh, loss=loss) if turns > 1 else None

        def step(edge: int) -> float:
            x = torch.randn(1, 3, edge, edge)
            y: Tensor = torch.rand(1, 3, 2 * edge, 2 * edge) if picture else torch.tensor([1])
            made.zero_grad()
            ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps is not there before
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            began = time.perf_counter()
            if model is None:
                loss(made(x), y).backward()
            else:
                model.step(x, y)
            seconds = time.perf_counter() - began
            found.update(peak_bytes=resident("VmHWM") - before)
            return seconds

        found: dict[str, Any] = {}
        step(SMALL)
        if pixels <= PLANNED:
            step(pixels)
        wrote = written()
        found["seconds"] = step(pixels)
        return {**found, "written_bytes": written() - wrote}


def written() -> int:
    """Bytes that this process has written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


# ---- around them


def asked(part: Part, pixels: int, turns: int, disk: Path, budget: str = "") -> dict[str, Any]:
    """One step of a way."""
    words = [part.net, str(pixels), str(turns), budget, str(disk)]
    done = subprocess.run(
        [sys.executable, __file__, "--one", *words],
        check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, rounds: int, disk: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """One part; of images that are larger than any piece what was measured `before`, if anything."""
    part, there = PARTS[name], environment()
    pairs: dict[str, list[dict[str, Any]]] = {way: [] for way in part.ways}
    for number in range(rounds):
        for way in order([*part.ways], number):
            turns, budget = part.ways[way]
            pairs[way].append(asked(part, part.pair, turns, disk, budget))
        told = ", ".join(str(_ratio(pairs, way)) for way in [*part.ways][1:])
        print(f"{name}, round {number + 1}: {told}", flush=True)
    found: dict[str, Any] = {"pairs": pairs, "piece": asked(part, part.piece, 1, disk)}
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return with_large({"benchmark": "any-size", "part": name, "rounds": rounds, "found": found,
            "environment": {**there, **more}}, disk, before)  # fmt: skip


def with_large(result: dict[str, Any], disk: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """A result with the images that are larger than any piece: those of another one, or measured now."""
    if before is not None:
        known = before["found"].get("large", [])
        large = {"large": known, "large_commit": before["found"].get("large_commit", "")}
        return {**result, "found": {**result["found"], **large}}
    part, found = PARTS[result["part"]], list[Any]()
    for each in part.large:
        found.append(asked(part, each.pixels, each.turns, disk, each.budget))
        size = f"{each.pixels} x {each.pixels}"
        print(f"{result['part']}, {size}, {each.way}: {found[-1]}", flush=True)
    large = {"large": found, "large_commit": environment()["commit"]}
    return {**result, "found": {**result["found"], **large}}


def on_record(results: Path, name: str) -> dict[str, Any]:
    """What was measured before."""
    file = results / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {"found": {}}


def _ratio(pairs: dict[str, list[dict[str, Any]]], way: str) -> Median:
    """Of seconds, to those of one piece."""
    piece, *_ = pairs.values()
    return ratio([told["seconds"] for told in pairs[way]], [told["seconds"] for told in piece])


def section(result: dict[str, Any]) -> str:
    """A table of one part."""
    name, found = result["part"], result["found"]
    part, rows = PARTS[name], list[tuple[str, ...]]()

    def row(way: str, pixels: int, told: list[dict[str, Any]], compared: str) -> None:
        seconds = sorted(one["seconds"] for one in told)[len(told) // 2]
        peak = sorted(one["peak_bytes"] for one in told)[len(told) // 2]
        disk = max(one["written_bytes"] for one in told)
        rows.append((
            way, f"{pixels} x {pixels}", f"{seconds:.1f}", f"{1e6 * seconds / pixels**2:.2f}", compared,
            f"{peak / MIB:,.0f}", f"{disk / MIB:,.0f}",
        ))  # fmt: skip

    piece, *others = part.ways
    row(piece, part.pair, found["pairs"][piece], "")
    for way in others:
        row(way, part.pair, found["pairs"][way], str(_ratio(found["pairs"], way)))
    row(piece, part.piece, [found["piece"]], "")
    for each, told in zip(part.large, found.get("large", []), strict=False):
        row(each.way, each.pixels, [told], "")
    header = (
        "way", "pixels", "seconds", "us per pixel", "of one piece", "peak, MiB", "written to the disk, MiB",
    )  # fmt: skip
    told = conditions(result)
    if commit := found.get("large_commit"):
        told = f"{told[:-1]}; images larger than any piece: commit {commit}."
    return f"### {part.net}\n\n{table(header, rows)}\n\n{told}"


PAGE = Page(HERE, section, tuple(PARTS)[:-1])


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PAGE.order))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", type=Path, default=Path.cwd())
    parser.add_argument(
        "--only", choices=["pairs", "large"], help="measure these, and keep the others as they are"
    )
    parser.add_argument("--results", type=Path, default=PAGE.home / "results")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one is not None:
        net, pixels, turns, budget, disk = told.one
        print(json.dumps(one(net, int(pixels), int(turns), budget, disk)))
        return 0
    parts = told.parts.split(",")
    if strange := [word for word in parts if word not in PARTS]:
        parser.error(f"there is no {strange[0]}; valid: {', '.join(PARTS)}")

    def work(name: str) -> dict[str, Any]:
        known = on_record(told.results, name) if told.only else None
        if known is not None and told.only == "large":
            if "part" not in known:
                parser.error(f"--only large keeps pairs, and {told.results} has none of {name}")
            return with_large(known, told.disk, None)
        return measured(name, told.rounds, told.disk, known)

    return PAGE.publish(parts, work, told.results)


if __name__ == "__main__":
    sys.exit(main())
