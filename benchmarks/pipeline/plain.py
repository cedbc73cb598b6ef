"""Stages without Fivefold: torch.distributed.pipelining on the same cut, and how long each stage takes.

Stages are timed in turns, each alone on the machine, and then two neighbours at the same time, since two
busy cores are slower than one: they share caches, memory and power.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from workload import Workload

from fivefold.recipes.models.resnet import ResNet

PHASE_S = 1.0
"""how long a phase of timing lasts at least"""


def divided(net: nn.Module, cut: str) -> list[nn.Sequential]:
    """Stages of a ResNet that begin at the modules of `cut`. Raises `TypeError` for other models."""
    if not isinstance(net, ResNet):
        raise TypeError(f"stages of {type(net).__name__} are not known here: measure a ResNet")
    units: dict[str, nn.Module] = {
        "conv1": nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    }
    for name in ("layer1", "layer2", "layer3", "layer4"):
        layer = getattr(net, name)
        units |= {f"{name}.{number}": block for number, block in enumerate(layer)}
    units["fc"] = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    names = list(units)
    bounds = [0, *(names.index(begin.strip()) for begin in cut.split(",")), len(names)]
    modules = list(units.values())
    return [nn.Sequential(*modules[a:b]) for a, b in itertools.pairwise(bounds)]


def shapes(stages: list[nn.Sequential], shape: tuple[int, ...]) -> list[torch.Size]:
    """Of what crosses every bound, that behind the last stage included."""
    crossing = torch.empty(shape, device="meta")
    found = [crossing.shape]
    for stage in stages:
        crossing = copy.deepcopy(stage).to("meta")(crossing)
        found.append(crossing.shape)
    return found


def pipelining(work: Workload, one_f_one_b: bool) -> Callable[[], float]:
    """One step of this rank by torch.distributed.pipelining, started by torchrun; gives the loss or NaN.

    Shapes are given: with lazy shape inference torch would run the stages on uninitialised numbers, and
    the running statistics of batch norms with them.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = divided(work.net(), work.cut)
    sizes = shapes(stages, work.shape())
    taken = torch.empty(sizes[rank], requires_grad=rank > 0)
    given = torch.empty(sizes[rank + 1], requires_grad=True)
    stage = PipelineStage(
        stages[rank], rank, size, torch.device("cpu"), input_args=taken, output_args=given
    )
    kind = Schedule1F1B if one_f_one_b else ScheduleGPipe
    schedule = kind(stage, work.micro_batches, nn.CrossEntropyLoss())
    optimiser = work.optimiser(stages[rank])
    images, classes = work.batch()

    def step() -> float:
        optimiser.zero_grad()
        losses: list[Tensor] = []
        if rank + 1 < size:
            schedule.step(*([images] if rank == 0 else []))
        else:
            schedule.step(target=classes, losses=losses)
        optimiser.step()
        return float(torch.stack(losses).mean()) if losses else float("nan")

    return step


def stage_times(work: Workload) -> Callable[[], dict[str, Any]]:
    """How long this rank's stage takes; each call measures anew. Started by torchrun.

    Returns seconds of forward, backward and update, alone and with another core busy, and of the sum of the
    gradients of a stage with the rank that stands opposite, both pairs at once.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = divided(work.net(), work.cut)
    stage, last = stages[rank], rank + 1 == size
    sizes = shapes(stages, work.shape())
    taken = torch.randn(sizes[rank], requires_grad=rank > 0)
    gradient = None if last else torch.randn(sizes[rank + 1])
    optimiser = work.optimiser(stage)
    optimiser.param_groups[0]["lr"] = 0.0  # as much work, and numbers stay what they are
    classes = work.batch()[1][: work.samples]
    pairs = [_group([r, size - 1 - r]) for r in range(size // 2)]
    numels = [sum(p.numel() for p in s.parameters()) for s in stages]

    def once() -> tuple[float, float]:
        begin = time.perf_counter()
        given = stage(taken)
        made = nn.functional.cross_entropy(given, classes) if last else given
        middle = time.perf_counter()
        made.backward(gradient)
        return middle - begin, time.perf_counter() - middle

    def phase(ranks: tuple[int, ...]) -> tuple[float, float] | None:
        dist.barrier()
        if rank not in ranks:
            return None
        end = time.monotonic() + PHASE_S
        found = [once()]
        while time.monotonic() < end:
            found.append(once())
        forward, backward = (statistics.median(each) for each in zip(*found, strict=True))
        return forward, backward

    def measured() -> dict[str, Any]:
        alone = [phase((r,)) for r in range(size)] if size > 2 else []
        busy = [phase((r, r + 1)) for r in range(0, size, 2)]
        dist.barrier()
        begin = time.perf_counter()
        optimiser.step()
        update_s = time.perf_counter() - begin
        optimiser.zero_grad()
        return {
            "alone_s": alone[rank] if alone else None,
            "busy_s": busy[rank // 2],
            "update_s": update_s,
            "reduce_s": _sum_s(pairs[min(rank, size - 1 - rank)], [numels[rank], numels[size - 1 - rank]]),
        }  # fmt: skip

    return measured


def _group(ranks: list[int]) -> dist.ProcessGroup:
    """Collective over all ranks, of which some get a group that is of no use to them."""
    return cast("dist.ProcessGroup", dist.new_group(ranks))


def _sum_s(pair: dist.ProcessGroup, sizes: list[int]) -> float:
    """Seconds of one sum of a stage's gradients, the mean of the two stages that a pair holds."""
    dist.barrier()
    flat = torch.ones(sum(sizes))
    begin = time.perf_counter()
    dist.all_reduce(flat, group=pair)
    return (time.perf_counter() - begin) / 2
