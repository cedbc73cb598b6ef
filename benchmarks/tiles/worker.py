"""One contender: builds everything, then runs blocks of training steps when it is told to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from layers import layers
from workload import Workload, parser

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve, timed


def plain(work: Workload) -> Callable[[], None]:
    """Torch alone, one process."""
    net, criterion, source = work.net(), work.loss(), cycle(work.batches())
    optimiser = work.optimiser(net)

    def step() -> None:
        images, targets = next(source)
        optimiser.zero_grad()
        criterion(net(images), targets).backward()
        optimiser.step()

    return step


def tiles(work: Workload, fuse: str, backend: str = "gloo") -> Callable[[], None]:
    """Fivefold, started by `fivefold run`."""
    import fivefold as ff
    from fivefold.plan import Comm, Tiles

    plan = ff.Plan(layout=ff.Layout(width=2), tiles=Tiles(fuse=fuse), comm=Comm(backend=backend))
    mesh = ff.start(plan, device="cpu")
    model = ff.parallelize(work.net(), mesh, loss=work.loss())
    optimiser = work.optimiser(model)
    source = cycle([model.shard(*batch) for batch in work.batches()])

    def step() -> None:
        images, targets = next(source)
        optimiser.zero_grad()
        model.step(images, targets)
        optimiser.step()

    return step


def halves(work: Workload) -> Callable[[], None]:
    """Torch alone in every process, on half of the image; they wait for each other at the end of a step."""
    import fivefold as ff
    from fivefold.plan import Comm

    plan = ff.Plan(layout=ff.Layout(data=2), comm=Comm(backend="gloo"))
    mesh, step = ff.start(plan, device="cpu"), plain(work)

    def together() -> None:
        step()
        dist.barrier(mesh.group("data"))

    return together


CONTENDERS: dict[str, Callable[[Workload], Callable[[], None]]] = {
    "half": plain,
    "halves": halves,
    "single": plain,
    "one-thread": plain,
    "layers": layers,
    "tiles": lambda work: tiles(work, "auto"),
    "tiles-shared": lambda work: tiles(work, "auto", "fivefold"),
    "tiles-never": lambda work: tiles(work, "never"),
    "tiles-2": lambda work: tiles(work, "2"),
    "tiles-4": lambda work: tiles(work, "4"),
}


def main() -> None:
    """Build, warm up, and serve blocks until the socket closes."""
    asked = parser(list(CONTENDERS), __doc__).parse_args()
    device = torch.device("cpu")
    step = CONTENDERS[asked.contender](Workload.of(asked))
    step()
    # A step takes seconds: what a cold cache adds to it is not worth a step that is not timed.
    serve(asked.socket, lambda n: {"step_s": timed(step, n, device, untimed=0)}, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
