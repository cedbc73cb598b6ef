"""One contender's process: builds everything, then makes steps, or counts memory, when it is told to."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from plain import StageTimes, pipelining
from torch import nn
from ways import COUNT_MEMORY, STAGES, TORCH_SCHEDULES, WAYS, Way
from workload import Workload, parser

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiles"))

from live import Live  # pyright: ignore[reportMissingImports] - that of benchmarks/tiles
from serving import serve

import fivefold as ff
from fivefold.plan import Comm, Memory, Pipeline, Tiles


class Ours:
    """Fivefold, started by `fivefold run`."""

    def __init__(self, work: Workload, way: Way) -> None:
        together = 1 if way.by_itself else work.micro_batches
        named = work.cut if "pipe" in way.layout else ""
        schedule = cast("Any", way.schedule)
        plan = ff.Plan(
            layout=ff.Layout(**way.layout),
            pipeline=Pipeline(schedule, together, way.stages_per_rank, named),
            memory=Memory(recompute=way.recompute),
            tiles=Tiles(fuse=way.fuse),
            comm=Comm(backend=way.backend),
        )
        mesh = ff.start(plan, device="cpu")
        example = torch.empty(work.shape(together), device="meta")
        self.model = ff.parallelize(work.net(), mesh, example=example, loss=nn.CrossEntropyLoss())
        self.optimiser = work.optimiser(self.model)
        images, classes = work.batch()
        pieces = zip(images.split(len(example)), classes.split(len(example)), strict=True)
        self.pieces = [self.model.shard(*piece) for piece in pieces]

    def __call__(self) -> float:
        """One step; the loss of the whole batch."""
        self.optimiser.zero_grad()
        losses = [self.model.step(*piece) for piece in self.pieces]
        self.optimiser.step()
        return float(torch.stack(losses).mean())

    def memory(self) -> dict[str, int]:
        """Bytes of one step: of activations, and of what there is for every parameter.

        Where micro-batches are steps of their own the first one is counted: later ones keep no more.
        """
        parameters = list(self.model.parameters())
        self.optimiser.zero_grad()
        live = Live(without=parameters)
        with live, live.noting_backward():
            self.model.step(*self.pieces[0])
        states = [t for p in parameters for t in self.optimiser.state[p].values()]
        grads = [p.grad for p in parameters if p.grad is not None]
        return {
            "saved_bytes": live.saved_bytes,
            "peak_bytes": live.peak_bytes,
            "parameter_bytes": _bytes(parameters),
            "gradient_bytes": _bytes(grads),
            "optimiser_bytes": _bytes([s for s in states if isinstance(s, torch.Tensor)]),
        }


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def timed(step: Callable[[], float], steps: int) -> dict[str, Any]:
    """Seconds of each of some steps, and the loss of the last one where this rank knows it."""
    found: list[float] = []
    loss = math.nan
    for _ in range(steps):
        begin = time.perf_counter()
        loss = step()
        found.append(time.perf_counter() - begin)
    return {"step_s": found, "loss": None if math.isnan(loss) else loss}


def main() -> None:
    """Build, make a step, and serve until the socket closes."""
    asked = parser([*WAYS, *TORCH_SCHEDULES, *STAGES], __doc__).parse_args()
    work, device = Workload.of(asked), torch.device("cpu")
    if asked.contender in STAGES:
        times = StageTimes(work)
        serve(asked.socket, lambda _: times(), device)
    elif asked.contender in WAYS:
        ours = Ours(work, WAYS[asked.contender])
        first = ours()
        serve(
            asked.socket,
            lambda n: ours.memory() if n == COUNT_MEMORY else timed(ours, n) | {"first": first},
            device,
        )
    else:
        step = pipelining(work, one_f_one_b=asked.contender == "torch-1f1b")
        first = step()
        told = {"first": None if math.isnan(first) else first}
        serve(asked.socket, lambda n: timed(step, n) | told, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
