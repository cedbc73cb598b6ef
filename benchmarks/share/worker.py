"""One contender's process: builds a net, then makes steps when it is told to, or counts memory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve, timed

import fivefold as ff
from fivefold.plan import Provenance
from fivefold.recipes.models import build

COUNT_MEMORY, UPDATES = -1, -2
"""what is asked for instead of a number of steps"""


def parser() -> argparse.ArgumentParser:
    """What every process is told."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("contender")
    made.add_argument("--socket")
    made.add_argument("--model", default="resnet20")
    made.add_argument("--pixels", type=int, default=32)
    made.add_argument("--batch", type=int, default=64, help="images of all processes together")
    made.add_argument("--batch-norm", choices=("global", "replica"), default="global")
    made.add_argument("--per-device", type=int, default=0, help="instances, if not as launched")
    made.add_argument("--optimizer", choices=("SGD", "Adam"), default="SGD")
    return made


class Plain:
    """A process that exchanges nothing with the others: what they could reach together."""

    def __init__(self, asked: argparse.Namespace, ranks: int) -> None:
        self.net, self.loss = _net(asked), nn.CrossEntropyLoss()
        self.x, self.y = _batch(asked, asked.batch // ranks)

    def step(self) -> None:
        """Forward and backward."""
        self.loss(self.net(self.x), self.y).backward()


class Ours:
    """A rank of Fivefold."""

    def __init__(self, asked: argparse.Namespace) -> None:
        told = os.environ.get("FIVEFOLD_PLAN")
        plan = ff.Plan.load(told) if told else ff.Plan()
        key: dict[str, object] = {"parallel.batch_norm": asked.batch_norm}
        for weights in ("own", "shared"):
            if asked.contender.startswith(weights):
                key["instances.weights"] = weights
        if asked.per_device:
            key["instances.per_device"] = asked.per_device
        self.mesh = ff.start(plan.replace(key, Provenance("user", "benchmark")), device="cpu")
        self.net = ff.parallelize(_net(asked), self.mesh, loss=nn.CrossEntropyLoss())
        self.x, self.y = self.net.shard(*_batch(asked, asked.batch))

    def step(self) -> None:
        """Forward and backward."""
        self.net.step(self.x, self.y)


def _net(asked: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return build(asked.model, 10)


def _batch(asked: argparse.Namespace, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(images, 3, asked.pixels, asked.pixels), torch.randint(10, (images,))


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """What this process takes for tensors: its part of what it shares, as the kernel tells; else all."""
    spans: list[tuple[int, int]] = []
    parts_kib, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = "fivefold-copies" in line
            if inside:
                spans.append((begin, end))
        elif inside and words[0] == "Pss:":
            parts_kib += int(words[1])
    apart = [t for t in tensors if not any(b <= t.data_ptr() < e for b, e in spans)]
    return (parts_kib << 10) + sum(t.nbytes for t in apart)


def main() -> None:
    """Build, make a step, and serve until the socket closes."""
    asked = parser().parse_args()
    ours = Plain(asked, 2) if asked.contender == "apart" else Ours(asked)
    settings = {"lr": 0.01} | ({"momentum": 0.9} if asked.optimizer == "SGD" else {})
    optim = getattr(torch.optim, asked.optimizer)(ours.net.parameters(), **settings)
    meet: Callable[[], object] = dist.barrier if asked.contender[:3] in ("own", "sha") else int

    def step() -> None:
        ours.step()
        optim.step()
        optim.zero_grad()

    def update() -> float:
        ours.step()
        meet()  # who comes first must not wait within its update
        begun = time.perf_counter()
        optim.step()
        taken = time.perf_counter() - begun
        optim.zero_grad()
        return taken

    def answer(number: int) -> dict[str, Any]:
        if number == COUNT_MEMORY:
            state = [t for of in optim.state.values() for t in of.values()]
            return {"held_bytes": held_bytes([*ours.net.parameters(), *state])}
        if number == UPDATES:
            return {"update_s": [update() for _ in range(4)][1:]}
        return {"step_s": timed(step, number, torch.device("cpu"))}

    for _ in range(2):
        step()
    serve(asked.socket, answer, torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
