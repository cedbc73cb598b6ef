"""Ranks that `fivefold tune` tries: they train a recipe, or a model on random samples, when they are asked.

Started by `fivefold run` with a plan: `python -m fivefold.cli.trial SPEC ADDRESS`. Between requests they are
blocked in the kernel.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(words: list[str]) -> None:
    """Train by request, until the line is cut."""
    spec, address = json.loads(words[0]), words[1]
    from fivefold.mesh import start

    with start() as mesh, socket.socket(socket.AF_UNIX) as line:
        step = _step_of(spec, mesh)
        line.connect(address)
        wire = line.makefile("rw", encoding="utf-8")
        print(json.dumps({"rank": mesh.rank}), file=wire, flush=True)
        for text in wire:
            begun, samples = time.perf_counter(), 0
            for _ in range(json.loads(text)["steps"]):
                samples += step()
            taken = time.perf_counter() - begun
            print(json.dumps({"seconds": taken, "samples": samples}), file=wire, flush=True)


def _step_of(spec: dict[str, Any], mesh: Any) -> Callable[[], int]:
    """What makes a step, and says how many samples all ranks took."""
    import torch

    from fivefold.parallel import parallelize
    from fivefold.parallel.arithmetic import Arithmetic
    from fivefold.train.optimizer import optimizer_of
    from fivefold.train.precision import settle_precision

    plan = settle_precision(mesh.plan, mesh)
    torch.manual_seed(plan.numerics.seed)
    arithmetic = Arithmetic(plan.numerics, mesh.device)
    net, loss, batches = (_recipe if "recipe" in spec else _model)(spec, mesh)
    model = parallelize(arithmetic.net(net), mesh, loss=loss)
    if "model" in spec:
        part = model.shard(*next(batches))
        batches = itertools.repeat(part)
    optimizer = optimizer_of(model, plan.train)
    model.train()

    def step() -> int:
        inputs, targets = next(batches)
        with arithmetic.autocast():
            model.step(arithmetic.inputs(inputs), targets)
        optimizer.step()
        optimizer.zero_grad()
        return plan.train.batch_size

    return step


def _recipe(spec: dict[str, Any], mesh: Any) -> tuple[Any, Any, Iterator[Any]]:
    from fivefold import recipes
    from fivefold.data import loader
    from fivefold.recipes import models
    from fivefold.train.task import CLASSES, PICTURES

    recipe, plan = recipes.get(spec["recipe"]), mesh.plan
    directory = Path(spec["data"]) if spec["data"] else None
    images, _ = recipe.images(directory, spec["size"])
    net = models.build(plan.train.model, len(images.classes), recipe.channels)
    batches = loader(images, mesh, batch_size=plan.train.batch_size, seed=plan.numerics.seed)

    def endless() -> Iterator[Any]:
        while True:
            full = plan.train.batch_size <= len(images)
            for number, batch in enumerate(batches):
                if not full or number < len(images) // plan.train.batch_size:
                    yield batch

    task = PICTURES if recipe.returns == "picture" else CLASSES
    return net, task.loss(), endless()


def _model(spec: dict[str, Any], mesh: Any) -> tuple[Any, Any, Iterator[Any]]:
    import torch
    from torch import nn

    from fivefold.cli.model import load

    shape, samples = spec["shape"], mesh.plan.train.batch_size
    net = load(spec["model"], spec["classes"], shape[0])
    if spec["integers"]:
        x = torch.randint(spec["integers"], (samples, *shape))
    else:
        x = torch.randn(samples, *shape)
    with torch.no_grad():
        outputs = net.eval()(x[:1])
    y = torch.zeros(samples, *outputs.shape[1:])
    return net, nn.MSELoss(), iter([(x, y)])


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main(sys.argv[1:])
    os._exit(0)  # taking torch apart takes a second, of cores on which others are measured
