"""Training steps in which communication matters: small images, small batches, large models.

Three ways to reduce the same gradients, and the same step without any:

    gloo + DDP        DistributedDataParallel as everyone uses it
    fivefold + DDP    the same, its backend replaced
    fivefold          Fivefold's own reducer, whose buckets lie in the arena
    alone             each rank for itself: what is left if communication cost nothing
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODELS = ("resnet18", "resnet50", "vgg11", "shufflenet_v2_x1_0")
CONTENDERS = ("ddp-gloo", "ddp-fivefold", "reducer", "alone")
BATCH, PIXELS, CLASSES, STEPS = 4, 64, 10, 4


def measured(
    folder: Path, models: Sequence[str], rounds: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds per step by contender, for every model, of each round."""
    from fivefold.bench import begun

    found: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for model in models:
        running = {
            name: begun(name, 2, folder, [sys.executable, __file__, name, model]).meet()
            for name in CONTENDERS
        }
        try:
            of_model: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for number in range(rounds):
                names = list(running)
                for name in names[number % 4 :] + names[: number % 4]:
                    answers = running[name].ask({"steps": STEPS})
                    of_model[name].append(max(answer["seconds"] for answer in answers))
        finally:
            for contender in running.values():
                contender.close()
        for name, rounds_s in of_model.items():
            found[name].append(rounds_s)
    return {"step": found}


def main(contender: str, name: str, address: str) -> None:
    """A rank: answer each request with the mean time of a step."""
    import torch

    from fivefold import start
    from fivefold.plan import Plan, Provenance

    torch.set_num_threads(1)
    torch.manual_seed(0)
    backend = "gloo" if contender == "ddp-gloo" else "fivefold"
    chosen = {"comm.backend": backend, "parallel.batch_norm": "replica"}  # as DDP has it
    plan = Plan().replace(chosen, Provenance("user", "benchmark"))
    with start(plan, device="cpu") as mesh, socket.socket(socket.AF_UNIX) as line:
        step = _step(contender, _model(name), mesh)
        step()
        line.connect(address)
        wire = line.makefile("rw", encoding="utf-8")
        print(json.dumps({"rank": mesh.rank}), file=wire, flush=True)
        for text in wire:
            begun = time.perf_counter()
            for _ in range(json.loads(text)["steps"]):
                step()
            seconds = (time.perf_counter() - begun) / STEPS
            print(json.dumps({"seconds": seconds}), file=wire, flush=True)


def _model(name: str) -> Any:
    from torch import nn

    from fivefold.recipes import models

    if name == "vgg11":  # as in its paper, for 64 pixels: 129 million parameters
        widths = [64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"]
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            if isinstance(width, int):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        head = [nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
        return nn.Sequential(*layers, *head, nn.Linear(4096, CLASSES))
    return models.build(name, CLASSES)


def _step(contender: str, net: Any, mesh: Any) -> Callable[[], None]:
    import torch
    from torch import nn

    import fivefold as ff

    inputs = torch.randn(BATCH, 3, PIXELS, PIXELS)
    targets = torch.randint(0, CLASSES, (BATCH,))
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if contender == "reducer":
        model = ff.parallelize(net, mesh, loss=loss)

        def act() -> None:
            optimizer.zero_grad()
            model.step(inputs, targets)
            optimizer.step()

        return act
    wrapped = net
    if contender != "alone":
        wrapped = nn.parallel.DistributedDataParallel(net, process_group=mesh.group("data"))

    def plain() -> None:
        optimizer.zero_grad()
        loss(wrapped(inputs), targets).backward()
        optimizer.step()

    return plain


if __name__ == "__main__":
    main(*sys.argv[1:])
