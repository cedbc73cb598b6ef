"""What it costs to see whether a recording still stands for the net: guards, and recording again.

    python benchmarks/tiles/guards.py

One process, one tile. Steps are timed as they are; within them, what guards take. The net is recorded
again at the second and third step, at every new epoch and in every 1000th step: for epochs of 390 steps, as
CIFAR-10 has at 128 images, that is 1.39 recordings in 390 steps. Goals: together at most 0.3 % of a step of
ResNet-20, and 1 % of one of a thousand modules.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
from figures import environment
from torch import nn

import fivefold as ff
from fivefold.parallel.graph.guards import Guards
from fivefold.parallel.intercept import Share
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.programs import Programs
from fivefold.parallel.trees import call_with
from fivefold.recipes import models

EPOCH, EVERY, STEPS, WARM = 390, 1000, 12, 4


def thousand() -> nn.Module:
    """333 convolutions, each with a norm and an activation, and a head."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(333):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet20": (lambda: models.build("resnet20"), 128),
    "1,000 modules": (thousand, 32),
}


class Watch:
    """Adds up the seconds that a method takes."""

    def __init__(self, kind: type, name: str) -> None:
        self.taken: list[float] = []
        plain = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.taken.append(time.perf_counter() - begin)

        setattr(kind, name, timed)


def main() -> None:
    """Measure and print, a line per net."""
    torch.set_num_threads(1)
    guards, recordings = Watch(Guards, "broken"), Watch(Programs, "recorded")
    with ff.start(device="cpu") as mesh:
        for name, (build, rows) in NETS.items():
            print(
                f"{name}, {rows} images of 32x32: {measured(build(), rows, mesh, guards, recordings)}"
            )
    told = environment()
    print(
        f"{told['cpu']}; torch {torch.__version__}, one thread; commit {told['commit']}, {told['date']}"
    )


def measured(net: nn.Module, rows: int, mesh: Any, guards: Watch, recordings: Watch) -> str:
    """The shares in words."""
    tiles = RecordedNet(net, mesh)
    images = torch.randn(rows, 3, 32, 32)
    steps: list[float] = []
    for watch in (guards, recordings):
        watch.taken.clear()
    for number in range(WARM + STEPS):
        begin = time.perf_counter()
        share = Share(rows, 0, rows, seed=0, step=number, group=None)
        outputs: Any = tiles.run(call_with, images, share).parts
        outputs.square().mean().backward()
        steps.append(time.perf_counter() - begin)
    step_s = statistics.median(steps[WARM:])
    guards_s = statistics.median(guards.taken[-STEPS:])
    again_s = statistics.median(recordings.taken) * (1 + EPOCH / EVERY) / EPOCH
    return (
        f"step {1e3 * step_s:.0f} ms, guards {100 * guards_s / step_s:.2f} % ({1e3 * guards_s:.2f} ms), "
        f"recording again {100 * again_s / step_s:.2f} % ({len(recordings.taken)} recordings of "
        f"{statistics.median(recordings.taken):.2f} s), together {100 * (guards_s + again_s) / step_s:.2f} %"
    )


if __name__ == "__main__":
    main()
