"""Training steps of small nets at one global batch, by as many instances per device as there are ranks.

    fivefold run --instances 4 benchmarks/share/steps.py [NAME...]      of the campaign's cases; all nets else

Rungs: eager in float32; bfloat16, channels last and a fused optimiser; that, compiled. One process alone has
more, which several have to be compared with: compiled, with CUDA graphs; and batches of two and four times as
many images, which make other steps, and fill a GPU by larger kernels.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from cases import keep
from torch import nn

import fivefold as ff
from fivefold.plan import Provenance
from fivefold.recipes.models import build

TINY = bool(os.environ.get("CAMPAIGN_TINY"))
CASES = (("resnet20", 32, 16),) if TINY else (
    ("resnet18", 32, 256), ("shufflenet_v2_x1_0", 32, 256), ("mobilenet_v2", 32, 256),
    ("resnet18", 224, 64), ("resnet50", 224, 64),
)  # fmt: skip
"""net, pixels of an edge, images of the global batch"""
RUNGS = ("eager", "half") if TINY else ("eager", "half", "compiled")
ALONE = ("double",) if TINY else ("graphs", "double", "fourfold")
TIMES = {"double": 2, "fourfold": 4}
ROUNDS, STEPS = (2, 1) if TINY else (7, 10)


def step_of(mesh: ff.Mesh, name: str, pixels: int, images: int, rung: str) -> Callable[[], object]:
    """What a rank does in a step."""
    if rung == "graphs":
        return with_graphs(mesh, name, pixels, images)
    plan = mesh.plan.replace(
        {"parallel.batch_norm": "replica", "parallel.compile": rung == "compiled"},
        Provenance("user", "benchmark"),
    )
    torch.manual_seed(0)
    form = torch.contiguous_format if rung == "eager" else torch.channels_last
    net = build(name, 10).to(mesh.device, memory_format=form)
    model = ff.parallelize(net, ff.start(plan), loss=nn.CrossEntropyLoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=rung != "eager")
    x = torch.randn(images, 3, pixels, pixels, device=mesh.device).contiguous(memory_format=form)
    x, y = model.shard(x, torch.randint(10, (images,), device=mesh.device))

    def step() -> object:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=rung != "eager"):
            loss = model.step(x, y)
        optim.step()
        optim.zero_grad()
        return loss

    return step


def with_graphs(mesh: ff.Mesh, name: str, pixels: int, images: int) -> Callable[[], object]:
    """What torch alone does for one process, at its best: forward and backward are CUDA graphs."""
    torch.manual_seed(0)
    net = build(name, 10).to(mesh.device, memory_format=torch.channels_last)
    compiled = torch.compile(net, mode="reduce-overhead")
    optim = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(images, 3, pixels, pixels, device=mesh.device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (images,), device=mesh.device)

    def step() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(mesh.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss

    return step


def rated(mesh: ff.Mesh, name: str, pixels: int, images: int) -> dict[str, float]:
    """Images per second by rung; a line for each, from the first rank."""
    rates: dict[str, float] = {}
    for rung in (*RUNGS, *ALONE) if mesh.size == 1 else RUNGS:
        batch = images * TIMES.get(rung, 1)
        step = step_of(mesh, name, pixels, batch, rung)
        taken: list[float] = []
        for _ in range(ROUNDS + 1):
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - begun) / STEPS)
        rates[rung] = batch / statistics.median(taken[1:])
        if mesh.rank == 0:
            print(
                f"{name:18} {pixels:3} pixels, batch {batch:4}, {rung:8} {mesh.size} ranks: "
                f"{rates[rung]:9,.0f} images/s",
                flush=True,
            )
    return rates


def main() -> None:
    """The nets that are named, each kept as it is done."""
    with ff.start() as mesh:
        for name, pixels, images in CASES:
            case = f"steps-{name}-{pixels}-{mesh.size}"
            if sys.argv[1:] and case not in sys.argv:
                continue
            begun = time.monotonic()
            rates = rated(mesh, name, pixels, images)
            if mesh.rank == 0:
                said = ", ".join(f"{rung} {rate:,.0f}" for rung, rate in rates.items())
                seconds = time.monotonic() - begun
                keep(case, "passed", seconds, f"images/s: {said}", images_per_s=rates)


if __name__ == "__main__":
    main()
