"""What plans say: messages with and without fusing, and how long it takes to make one for many tiles."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

import torch
from bystanders import Bystanders
from figures import environment
from torch import nn

from fivefold.mesh import owned
from fivefold.parallel.graph.record import record
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.program.costs import Costs, Options
from fivefold.parallel.program.program import planned
from fivefold.parallel.program.rule import Here
from fivefold.parallel.program.spread import Division, Grid, Spread
from fivefold.parallel.program.table import Totals, totals
from fivefold.parallel.trees import call_with
from fivefold.recipes.models import build

TILE = 512
GRIDS = ((1, 2), (2, 2))
MODELS = ("edsr", "resnet50")
MOST_EXTRA = 0.05
LATENCIES_S = tuple(10 ** (exponent / 4) for exponent in range(-16, 3))
"""how dear an exchange is made to seem to `auto`: 0.1 ms to 3 s"""
LARGE_GRID, LARGE_IMAGE, LARGE_MODEL = (8, 8), 16384, "resnet50"


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All of it. No other process takes part."""
    before = environment()
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for sizes in GRIDS:
            shape = (1, 3, asked.tile * sizes[0], asked.tile * sizes[1])
            tape = taped(build(model, 1000), shape)
            plain = drawn(tape, shape, sizes, Options("never"))
            fused = fewest(tape, shape, sizes)
            print(
                f"{model} {sizes}: {plain.messages} messages, {fused[1].messages} fused", flush=True
            )
            rows.append(
                {
                    "model": model,
                    "grid": sizes,
                    "never": dataclasses.asdict(plain),
                    "fused": dataclasses.asdict(fused[1]),
                    "latency_s": fused[0],
                }
            )
    plan_s, others = planning(asked)
    return {
        "benchmark": "plans",
        "tile": asked.tile,
        "most_extra": MOST_EXTRA,
        "rounds": asked.rounds,
        "rows": rows,
        "large": {"model": LARGE_MODEL, "image": asked.large, "grid": LARGE_GRID},
        "plan_s": plan_s,
        "environment": {**before, "torch": torch.__version__, **others.told()},
    }


def fewest(tape: Tape, shape: tuple[int, ...], sizes: tuple[int, int]) -> tuple[float, Totals]:
    """The plan with the fewest messages that computes at most so much twice, and the latency that gave it."""
    found: list[tuple[float, Totals]] = []
    for latency_s in LATENCIES_S:
        told = drawn(
            tape, shape, sizes, Options("auto", costs=Costs(latency_s=latency_s, overlaps=False))
        )
        if told.extra_flops <= MOST_EXTRA:
            found.append((latency_s, told))
    return min(found, key=lambda pair: (pair[1].messages, pair[1].extra_flops))


def planning(asked: argparse.Namespace) -> tuple[list[float], Bystanders]:
    """Seconds to plan the large image, in rounds that nobody disturbed, after one that is not timed."""
    seconds_to_plan(asked.large)
    others = Bystanders(asked.rounds, lambda: sum(os.times()[:2]))
    found: list[float] = []
    while len(found) < asked.rounds:
        others.begin()
        taken_s = seconds_to_plan(asked.large)
        if others.were_quiet():
            found.append(round(taken_s, 3))
    return found, others


def seconds_to_plan(image: int) -> float:
    """To record a net and make the plan of one rank in the middle of the grid."""
    net, shape = build(LARGE_MODEL, 1000), (1, 3, image, image)
    middle = LARGE_GRID[0] // 2 * LARGE_GRID[1] + LARGE_GRID[1] // 2
    begin = time.perf_counter()
    drawn(taped(net, shape), shape, LARGE_GRID, Options("auto"), middle)
    return time.perf_counter() - begin


def taped(net: nn.Module, shape: tuple[int, ...]) -> Tape:
    """The recorded net; no number is computed."""
    return record(net, call_with, torch.empty(shape, device="meta"), [torch.Size(shape)])


def drawn(
    tape: Tape, shape: tuple[int, ...], sizes: tuple[int, int], options: Options, rank: int = 0
) -> Totals:
    """What the plan of one rank says."""
    cut = [(axis, n) for axis, n in zip(("height", "width"), sizes, strict=True) if n > 1]
    grid = Grid(tuple(axis for axis, _ in cut), tuple(n for _, n in cut))
    spread = Spread.whole(shape)
    for index, (axis, n) in enumerate(cut):
        dim = {"height": 2, "width": 3}[axis]
        bounds = [owned(shape[dim], n, part).start for part in range(n)]
        spread = spread.with_cut(dim, Division.at((index,), (*bounds, shape[dim])))
    here = Here(grid, rank)
    return totals(planned(tape, [spread], here, options), here)
