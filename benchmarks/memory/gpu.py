"""On a GPU whose memory is filled but for a part: how many pixels a step takes, and how fast.

    PYTHONPATH=tests python benchmarks/memory/gpu.py [--left 12,24,48] [--minutes 8] [--rounds 7]

Ballast leaves 12, 24 or 48 GiB. The largest image that ResNet-50 trains without a budget is found, to a step
of the square root of two; then all ways train images of four and eight times the pixels. VGG-16 trains 256
samples in what is left, beside itself with all memory (vDNN: 1.18 of the time in 12 GiB). TRL's
`OffloadActivations` takes part where TRL is installed. What the minutes do not suffice for is named.
`--device cpu` tries the script, not the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.plan import Provenance
from fivefold.recipes.models.resnet import resnet50
from fivefold.recipes.models.vgg import vgg16_bn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment, ratio, table
from ways import CASES, per_block

GIB = 1 << 30
SIZES = (512, 724, 1024, 1448, 2048, 2896, 4096, 5792, 8192, 11584, 16384, 23168, 32768)
TINY = (64, 90, 128, 181, 256)
GOALS = "goals: 4 times the pixels at 1.43 of the time per pixel, and no way faster; VGG-16 at 1.18"
Step = Callable[[], Tensor]
Make = Callable[[nn.Module, Tensor, Tensor], Step]


@dataclass
class Bench:
    """Where and how long."""

    device: torch.device
    rounds: int
    ends: float
    """by `time.monotonic`"""

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self.ends

    def wait(self) -> None:
        """Until all is computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, make: Make, net: nn.Module, x: Tensor, y: Tensor) -> list[float] | None:
        """Of steps after four; None if they do not fit."""
        step = None
        try:
            step = make(copy.deepcopy(net), x, y)
            taken: list[float] = []
            for _ in range(4 + self.rounds):
                self.wait()
                began = time.perf_counter()
                step()
                self.wait()
                taken.append(time.perf_counter() - began)
            return taken[4:]
        except (torch.OutOfMemoryError, UsageError):
            return None
        finally:
            del step
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def plain(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Torch as it is."""
    loss = nn.CrossEntropyLoss()

    def step() -> Tensor:
        made = loss(net(x), y)
        made.backward()
        return made.detach()

    return step


def checkpointed(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Residual blocks, and layers between poolings, are computed again."""
    per_block(net, CASES["resnet50" if hasattr(net, "layer1") else "vgg16"].blocks)
    return plain(net, x, y)


def on_host(
    net: nn.Module, x: Tensor, y: Tensor, around: Callable[[], contextlib.AbstractContextManager[object]]
) -> Step:  # fmt: skip
    """All that is saved goes to the host."""
    step = plain(net, x, y)

    def spilling() -> Tensor:
        with around():
            return step()

    return spilling


def budgeted(net: nn.Module, x: Tensor, y: Tensor, budget: int) -> Step:
    """`memory.budget`."""
    plan = ff.Plan().replace({"memory.budget": f"{budget}B"}, Provenance("user", "benchmark"))
    model = ff.parallelize(net, ff.start(plan, device=x.device), loss=nn.CrossEntropyLoss())
    return lambda: model.step(x, y)


def ways(budget: int, device: torch.device) -> dict[str, Make]:
    """By name."""
    pinned = partial(save_on_cpu, pin_memory=device.type == "cuda")
    found: dict[str, Make] = {
        "checkpoint per block": checkpointed,
        "save_on_cpu, pinned": partial(on_host, around=pinned),
    }
    if device.type == "cuda" and importlib.util.find_spec("trl"):
        from trl.models.activation_offloading import OffloadActivations

        found["TRL's OffloadActivations"] = partial(on_host, around=OffloadActivations)
    return {**found, "memory.budget": partial(budgeted, budget=budget)}


def image(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One, of `size` x `size`, and its class."""
    return torch.randn(1, 3, size, size, device=device), torch.zeros(
        1, dtype=torch.long, device=device
    )


def pixels(bench: Bench, left_gib: int, sizes: tuple[int, ...]) -> str:
    """How many more pixels, and how fast."""
    net, short = resnet50().to(bench.device), Bench(bench.device, 1, bench.ends)
    largest = 0
    for number, size in enumerate(sizes):
        if short.seconds(plain, net, *image(size, bench.device)) is None:
            break
        largest = number
    base = bench.seconds(plain, net, *image(sizes[largest], bench.device))
    assert base is not None
    rows = [("no budget", _square(sizes[largest]), _median(base), "1.000")]
    for size in sizes[largest + 2 : largest + 4]:
        for name, make in ways(int(0.95 * left_gib * GIB), bench.device).items():
            if bench.over:
                rows.append((name, _square(size), "no time left", ""))
                continue
            taken = bench.seconds(make, net, *image(size, bench.device))
            more = (size / sizes[largest]) ** 2
            per_pixel = "" if taken is None else str(ratio([s / more for s in taken], base))
            rows.append(
                (
                    name,
                    _square(size),
                    "does not fit" if taken is None else _median(taken),
                    per_pixel,
                )
            )
    header = ("way", "image", "seconds, median", "per pixel, of no budget")
    return f"### ResNet-50, one image, {left_gib} GiB left\n\n{table(header, rows)}"


def samples(bench: Bench, left_gib: int, count: int, ballast: Callable[[], Tensor]) -> str:
    """VGG-16 in what is left, beside itself with all memory."""
    net = vgg16_bn().to(bench.device)
    x = torch.randn(
        count, 3, 224 if count > 8 else 32, 224 if count > 8 else 32, device=bench.device
    )
    y = torch.zeros(count, dtype=torch.long, device=bench.device)
    base = bench.seconds(plain, net, x, y)
    rows = [("all memory", _median(base) if base else "does not fit", "1.000")]
    held = ballast()
    for name, make in ways(int(0.95 * left_gib * GIB), bench.device).items():
        taken = None if bench.over else bench.seconds(make, net, x, y)
        compared = str(ratio(taken, base)) if taken and base else ""
        rows.append((name, _median(taken) if taken else "does not fit, or no time left", compared))
    del held
    header = ("way", "seconds, median", "of all memory")
    return f"### VGG-16, {count} samples in {left_gib} GiB\n\n{table(header, rows)}"


def _square(size: int) -> str:
    return f"{size} x {size}"


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f}"


def main() -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--left", default="12,24,48", help="GiB")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: torch.cuda.is_available() is False")
    device, gpu = torch.device(asked.device), asked.device == "cuda"
    bench = Bench(device, asked.rounds, time.monotonic() + 60 * asked.minutes)
    name = torch.cuda.get_device_name() if gpu else "a CPU, which tells nothing"
    print(
        f"{name}, torch {torch.__version__}, commit {environment()['commit']}; {GOALS}\n",
        flush=True,
    )
    for left_gib in map(int, asked.left.split(",")):

        def ballast(left_gib: int = left_gib) -> Tensor:
            size = max(torch.cuda.mem_get_info()[0] - left_gib * GIB, 0) if gpu else 0
            return torch.empty(size, dtype=torch.uint8, device=device)

        print(samples(bench, left_gib, 256 if gpu else 2, ballast), end="\n\n", flush=True)
        held = ballast()
        print(pixels(bench, left_gib, SIZES if gpu else TINY), end="\n\n", flush=True)
        del held
        if gpu:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
