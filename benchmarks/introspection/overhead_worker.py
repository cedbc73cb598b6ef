"""One contender of overhead.py: builds everything, then runs blocks when it is told to."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fivefold.recipes.models import build

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve, timed

BATCH, CLASSES, PIXELS = 64, 10, 32
CALLS = 2000
CPU = torch.device("cpu")


def training(name: str) -> Callable[[], None]:
    """A step of the contender."""
    torch.manual_seed(0)
    net = build("resnet20", CLASSES)
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(CLASSES, (BATCH,))
    return (
        _fivefold(net, images, labels) if name.startswith("fivefold") else _ddp(net, images, labels)
    )


def _fivefold(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    import fivefold as ff

    mesh = ff.start(device="cpu")
    model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = model.shard(images, labels)

    def step() -> None:
        model.step(x, y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    dist.init_process_group("gloo")
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    x, y = images[rows], labels[rows]
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def operations() -> Callable[[int], dict[str, Any]]:
    """Microseconds per call of each way; `overhead.WAYS` says what they are."""
    from fivefold.comm import register
    from fivefold.comm.tracing_groups import trace_groups
    from fivefold.trace import Phase, span
    from fivefold.trace.current import current
    from fivefold.trace.process import start

    register()
    dist.init_process_group("gloo")
    plain, ours = dist.group.WORLD, dist.new_group(backend="fivefold")
    trace_groups()
    passed = dist.new_group(backend="gloo")
    folder = Path(tempfile.mkdtemp(prefix="fivefold-trace-"))
    trace = start(folder, {"rank": dist.get_rank()})
    assert trace is not None
    tensor = torch.ones(1)

    def alone() -> None:
        trace.ended(trace.issue(1, 0, 0, 0, 4, 1))

    def phase() -> None:
        with span(Phase.FORWARD):
            pass

    def collective(group: Any) -> Callable[[], None]:
        return lambda: dist.all_reduce(tensor, group=group) and None

    def step_us() -> float:
        total = 0.0
        for _ in range(CALLS // 20):
            for _ in range(20):
                alone()
            begun = time.perf_counter()
            trace.step_ended()
            total += time.perf_counter() - begun
        return total / (CALLS // 20) * 1e6

    turns = itertools.count()

    def measure(_: int) -> dict[str, Any]:
        found = {"trace": _us(alone, 8 * CALLS), "span": _us(phase, CALLS), "step": step_us()}
        ways = [("gloo", plain, None), ("gloo-passed", passed, None), ("gloo-recorded", passed, trace),
                ("fivefold", ours, None), ("fivefold-recorded", ours, trace)]  # fmt: skip
        turn = next(turns) % len(ways)
        for name, group, recording in [*ways[turn:], *ways[:turn]]:
            current.trace = recording
            _us(collective(group), 20)
            found[name] = _us(collective(group), CALLS)
        current.trace = trace
        return {"us": found}

    return measure


def _us(call: Callable[[], Any], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


def profiled(step: Callable[[], None]) -> Callable[[int], dict[str, Any]]:
    """Steps under torch.profiler, as its users begin it; starting and stopping are not counted."""
    from torch.profiler import ProfilerActivity, profile

    def measure(steps: int) -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CPU]):
            return {"step_s": timed(step, steps, CPU)}

    return measure


def main() -> None:
    """Build, warm up, and serve blocks until the socket closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--socket", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.contender == "operations":
        answer = operations()
        answer(0)
    else:
        step = training(asked.contender)
        timed(step, 5, CPU)
        recorded = asked.contender.endswith("-profiled")
        answer = profiled(step) if recorded else lambda steps: {"step_s": timed(step, steps, CPU)}
    serve(asked.socket, answer, CPU)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
