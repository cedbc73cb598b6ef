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


class StageTimes:
    """How long this rank's stage takes; each call measures anew. Started by torchrun."""

    def __init__(self, work: Workload) -> None:
        dist.init_process_group("gloo")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        stages = divided(work.net(), work.cut)
        sizes = shapes(stages, work.shape())
        self._stage, last = stages[self._rank], self._rank + 1 == self._size
        self._taken = torch.randn(sizes[self._rank], requires_grad=self._rank > 0)
        self._gradient = None if last else torch.randn(sizes[self._rank + 1])
        self._classes = work.batch()[1][: work.samples] if last else None
        self._optimiser = work.optimiser(self._stage)
        self._optimiser.param_groups[0]["lr"] = 0.0  # as much work, and numbers stay what they are
        opposite = self._size - 1 - self._rank
        # All ranks make all groups.
        pairs = [dist.new_group([r, self._size - 1 - r]) for r in range(self._size // 2)]
        self._pair = cast("dist.ProcessGroup", pairs[min(self._rank, opposite)])
        of_both = (*stages[self._rank].parameters(), *stages[opposite].parameters())
        self._summed = torch.zeros(sum(p.numel() for p in of_both))

    def __call__(self) -> dict[str, Any]:
        """Seconds of (forward, backward), alone and with another core busy, of the update, and of the sum
        of a stage's gradients over two ranks.
        """
        # With as many ranks as cores no stage is ever alone.
        alone = [self._phase((r,)) for r in range(self._size)] if self._size > 2 else []
        busy = [self._phase((r, r + 1)) for r in range(0, self._size, 2)]
        update_s = self._timed(self._optimiser.step)
        self._optimiser.zero_grad()
        both_s = self._timed(self._sum)
        return {
            "alone_s": alone[self._rank] if alone else None,
            "busy_s": busy[self._rank // 2],
            "update_s": update_s,
            "reduce_s": both_s / 2,  # the two stages that a pair holds
        }

    def _phase(self, ranks: tuple[int, ...]) -> tuple[float, float] | None:
        """Medians of forward and backward of this rank's stage, while some ranks compute and others wait."""
        dist.barrier()
        if self._rank not in ranks:
            return None
        end = time.monotonic() + PHASE_S
        found = [self._once()]
        while time.monotonic() < end:
            found.append(self._once())
        forward, backward = (statistics.median(each) for each in zip(*found, strict=True))
        return forward, backward

    def _once(self) -> tuple[float, float]:
        begin = time.perf_counter()
        given = self._stage(self._taken)
        if self._classes is not None:
            given = nn.functional.cross_entropy(given, self._classes)
        middle = time.perf_counter()
        given.backward(self._gradient)
        return middle - begin, time.perf_counter() - middle

    def _sum(self) -> None:
        dist.all_reduce(self._summed, group=self._pair)

    def _timed(self, work: Callable[[], Any]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
