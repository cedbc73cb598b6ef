"""What it costs one rank to carry out a recorded program instead of the plain net.

    python benchmarks/tiles/overhead.py --device cuda

One process, one tile: nothing is exchanged, so the difference is Fivefold's own work. Steps of both alternate
in one process; the ratio of their medians and its 95 % interval are printed. Goal: at most 1.02.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
from figures import ratio
from serving import timed
from torch import Tensor, nn

import fivefold as ff
from fivefold.parallel.intercept import Share
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.trees import call_with
from fivefold.recipes import models

MODELS = ("resnet50", "edsr_small")


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=models.names(), default=MODELS)
    parser.add_argument("--image", type=int, default=512, help="pixels along each side")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a block")
    return parser.parse_args()


def main() -> None:
    """Measure and print, a line per model."""
    asked = options()
    device = torch.device(asked.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    with ff.start(device=device) as mesh:
        for name in asked.models:
            found = measured(name, asked, mesh, device)
            print(
                f"{name}, one image of {asked.image}x{asked.image} on {where}: program / plain {found}"
            )


def measured(name: str, asked: argparse.Namespace, mesh: Any, device: torch.device) -> Any:
    """Time of a step as a program, in times of the plain net's."""
    torch.manual_seed(0)
    image = torch.randn(1, 3, asked.image, asked.image, device=device)
    plain, own = (models.build(name, 1000).to(device) for _ in range(2))
    tiles = RecordedNet(own, mesh)
    share = Share(1, 0, 1, seed=0, step=0, group=None)
    contenders = {
        "plain": _step(plain, lambda: plain(image)),
        "program": _step(own, lambda: tiles.run(call_with, image, share).parts),
    }
    times: dict[str, list[float]] = {kind: [] for kind in contenders}
    for _ in range(asked.rounds):
        for kind, step in contenders.items():
            step_s = timed(step, asked.steps, device)
            times[kind].append(sum(step_s) / len(step_s))
    return ratio(times["program"], times["plain"])


def _step(net: nn.Module, run: Callable[[], Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad()
        run().square().mean().backward()
        optimiser.step()

    return step


if __name__ == "__main__":
    main()
