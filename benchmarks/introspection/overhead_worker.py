"""One contender of overhead.py: builds everything, then runs blocks when it is told to."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fivefold.comm import register
from fivefold.comm.tracing_groups import trace_groups
from fivefold.recipes.models import build
from fivefold.trace import Phase, span
from fivefold.trace.current import current
from fivefold.trace.process import start
from fivefold.trace.trace import Trace

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve, timed

BATCH, CLASSES, PIXELS = 64, 10, 32
CALLS, PIECES = 2000, 20
CPU = torch.device("cpu")


def training(name: str) -> Callable[[], None]:
    """A step of the contender."""
    torch.manual_seed(0)
    net = build("resnet20", CLASSES)
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(CLASSES, (BATCH,))
    return _fivefold(net, images, labels) if name == "fivefold" else _ddp(net, images, labels)


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


class Alone:
    """What a trace takes by itself, in microseconds."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def measured(self) -> dict[str, float]:
        """Each way of `overhead.WAYS` that needs no group."""
        return {
            "trace": _us(self._operation, 8 * CALLS), "fold": self._adding_up(),
            "span": _us(self._phase, CALLS), "step": self._step(),
        }  # fmt: skip

    def _operation(self) -> None:
        self._trace.ended(self._trace.issue(1, 0, 0, 0, 4, 1))

    def _phase(self) -> None:
        with span(Phase.FORWARD):
            pass

    def _adding_up(self) -> float:
        self._trace.fold()
        for _ in range(CALLS):
            self._operation()
        begun = time.perf_counter()
        self._trace.fold()
        return (time.perf_counter() - begun) / CALLS * 1e6

    def _step(self) -> float:
        total = 0.0
        for _ in range(CALLS // 20):
            for _ in range(20):
                self._operation()
            begun = time.perf_counter()
            self._trace.step_ended()
            total += time.perf_counter() - begun
        return total / (CALLS // 20) * 1e6


def operations() -> Callable[[int], dict[str, Any]]:
    """Microseconds per call of each way; `overhead.WAYS` says what they are."""
    register()
    dist.init_process_group("gloo")
    plain, ours = dist.group.WORLD, dist.new_group(backend="fivefold")
    trace_groups()
    passed = dist.new_group(backend="gloo")
    trace = start(Path(tempfile.mkdtemp(prefix="fivefold-trace-")), {"rank": dist.get_rank()})
    assert trace is not None
    alone, tensor, turns = Alone(trace), torch.ones(1), itertools.count()
    ways = [("gloo", plain, None), ("gloo-passed", passed, None), ("gloo-recorded", passed, trace),
            ("fivefold", ours, None), ("fivefold-recorded", ours, trace)]  # fmt: skip

    def measure(_: int) -> dict[str, Any]:
        pieces: dict[str, list[float]] = {name: [] for name, *_ in ways}
        # Many short pieces in turns: how two processes fall into step drifts within a second.
        for _ in range(PIECES):
            turn = next(turns) % len(ways)
            for name, group, recording in [*ways[turn:], *ways[:turn]]:
                current.trace = recording
                call = partial(dist.all_reduce, tensor, group=group)
                _us(call, 10)
                pieces[name].append(_us(call, CALLS // PIECES))
        current.trace = trace
        found = {name: statistics.median(own) for name, own in pieces.items()}
        return {"us": {**alone.measured(), **found}}

    return measure


def _us(call: Callable[[], Any], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


def states(step: Callable[[], None]) -> Callable[[int], dict[str, Any]]:
    """Seconds of steps as they are, recorded, and profiled, in turns; `overhead.STATES` says what they are.

    The same process takes them all: two processes of one program differ by more than a trace costs.
    """
    from torch.profiler import ProfilerActivity, profile

    trace = current.trace
    assert trace is not None, "fivefold run --trace began one"
    watcher = Cpu("fivefold-watch")
    turns = itertools.count()

    def one(name: str) -> float:
        current.trace = trace if name == "recorded" else None
        return timed(step, 1, CPU, untimed=0)[0]

    def profiled(steps: int) -> list[float]:
        current.trace = None
        with profile(activities=[ProfilerActivity.CPU]):
            return timed(step, steps, CPU)

    def measure(steps: int) -> dict[str, Any]:
        found: dict[str, list[float]] = {"plain": [], "recorded": []}
        begun, before = time.perf_counter(), watcher.used_s()
        first = next(turns) % 2
        for number in range(steps):
            order = ["plain", "recorded"] if (number + first) % 2 else ["recorded", "plain"]
            for name in order:
                found[name].append(one(name))
        share = (watcher.used_s() - before) / (time.perf_counter() - begun)
        found["profiled"] = profiled(steps)
        current.trace = trace
        return {"step_s": found, "watcher": share}

    return measure


class Cpu:
    """Processor time of a thread of this process, as the kernel counts it."""

    def __init__(self, name: str) -> None:
        (thread,) = (one for one in threading.enumerate() if one.name == name)
        self._file = Path(f"/proc/self/task/{thread.native_id}/schedstat")

    def used_s(self) -> float:
        """So far, in seconds."""
        return int(self._file.read_text().split()[0]) / 1e9


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
        answer = states(step)
    serve(asked.socket, answer, CPU)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
