"""One process whose memory is measured in one training step: of a whole image, or of its tile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from live import Live
from workload import Workload, parser

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve

SMALL = 64
"""pixels of the image of the step before, which makes what stays: gradients, buckets of gradients"""
LAYOUTS = {"1x2": {"width": 2}, "2x2": {"height": 2, "width": 2}}


def plain(work: Workload) -> Callable[[Workload], Callable[[], object]]:
    """Torch alone, one process."""
    net, criterion = work.net(), work.loss()

    def prepared(work: Workload) -> Callable[[], object]:
        images, targets = work.batches()[0]
        return lambda: criterion(net(images), targets).backward()

    return prepared


def tiles(work: Workload, layout: dict[str, int]) -> Callable[[Workload], Callable[[], object]]:
    """Fivefold, started by `fivefold run`."""
    import fivefold as ff
    from fivefold.plan import Comm

    plan = ff.Plan(layout=ff.Layout(**layout), comm=Comm(backend="gloo"))
    mesh = ff.start(plan, device="cpu")
    model = ff.parallelize(work.net(), mesh, loss=work.loss())

    def prepared(work: Workload) -> Callable[[], object]:
        model.tile_plan(torch.empty(work.shape, device="meta"))
        images, targets = model.shard(*work.batches()[0])
        return lambda: model.step(images, targets)

    return prepared


def measured(step: Callable[[], object]) -> dict[str, int]:
    """Bytes of one step, of this process."""
    at_rest = psutil.Process().memory_info().rss
    live = Live()
    with live, live.noting_backward():
        step()
    return {
        "saved_bytes": live.saved_bytes,
        "peak_bytes": live.peak_bytes,
        "at_rest_bytes": at_rest,
        "resident_bytes": _most_resident(),
    }


def _most_resident() -> int:
    """The most that this process ever had in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status: the benchmark runs on Linux")


def main() -> None:
    """Build, make a small step, and serve until the socket closes."""
    asked = parser(["whole", *LAYOUTS], __doc__).parse_args()
    work = Workload.of(asked)
    whole = asked.contender == "whole"
    prepare = plain(work) if whole else tiles(work, LAYOUTS[asked.contender])
    prepare(replace(work, height=SMALL, width=SMALL))()
    step = prepare(work)
    serve(asked.socket, lambda _: measured(step), torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
