"""On a GPU: what steps under a budget compute, hold and take; and on one that is filled but for a part.

    PYTHONPATH=tests python benchmarks/memory/gpu.py [--parts exact,filled] [--left 12,24,48] [--minutes 8]

`exact`: steps under budgets of 0.6, 0.4 and 0.25 of what they hold without are compared with those without,
bit by bit, and their peaks and times with what was predicted.

`filled`: ballast leaves 12, 24 or 48 GiB. The largest image that ResNet-50 trains without a budget is found,
to a step of the square root of two; then all ways train images of four and eight times the pixels. VGG-16
trains 256 samples in what is left, beside itself with all memory (vDNN: 1.18 of the time in 12 GiB). TRL's
`OffloadActivations` takes part where TRL is installed.

What the minutes do not suffice for is named.
`--device cpu` tries the script, not the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import os
import statistics
import sys
import time

# For all ways alike: a memory that is nearly full else falls into pieces.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.parallel import ParallelModel
from fivefold.plan import Provenance
from fivefold.recipes.models.resnet import resnet50
from fivefold.recipes.models.vgg import vgg16_bn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment, ratio, table
from ways import CASES, Case, per_block

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
    tables: bool = False
    """whether choices are printed"""

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
        except (torch.OutOfMemoryError, UsageError) as problem:
            print(str(problem).partition("\n")[0][:300], file=sys.stderr)
            return None
        finally:
            del step
            self.clean()

    def clean(self) -> None:
        """Let go what is not used, pinned memory and workspaces too, and count anew the most that is."""
        gc.collect()
        if self.device.type == "cuda":
            for clean in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
                getattr(torch._C, clean, bool)()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most that tensors held since; on a CPU, which tries the script only, some number."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 1 << 28


def plain(net: nn.Module, x: Tensor, y: Tensor, loss: nn.Module | None = None) -> Step:
    """Torch as it is."""
    loss = loss or nn.CrossEntropyLoss()

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
    model = under_budget(net, x.device, nn.CrossEntropyLoss(), budget)
    return lambda: model.step(x, y)


def under_budget(
    net: nn.Module, device: torch.device, loss: nn.Module, budget: int
) -> ParallelModel:
    """The net, for steps that hold no more."""
    plan = ff.Plan().replace({"memory.budget": f"{budget}B"}, Provenance("user", "benchmark"))
    return ff.parallelize(net, ff.start(plan, device=device), loss=loss)


def ways(budget: int, device: torch.device) -> dict[str, Make]:
    """By name, the slowest last: it may not get its time."""
    pinned = partial(save_on_cpu, pin_memory=device.type == "cuda")
    found: dict[str, Make] = {
        "memory.budget": partial(budgeted, budget=budget),
        "checkpoint per block": checkpointed,
    }
    if device.type == "cuda" and importlib.util.find_spec("trl"):
        with contextlib.suppress(ImportError):  # of what it needs in turn
            from trl.models.activation_offloading import OffloadActivations

            found["TRL's OffloadActivations"] = partial(on_host, around=OffloadActivations)
    return {**found, "save_on_cpu, pinned": partial(on_host, around=pinned)}


def image(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One, of `size` x `size`, and its class."""
    return torch.randn(1, 3, size, size, device=device), torch.zeros(
        1, dtype=torch.long, device=device
    )


@dataclass
class Trained:
    """What a few steps gave."""

    state: list[Tensor]
    """parameters, buffers and gradients after the last"""
    seconds: list[float]
    """of the last ones"""
    first_bytes: int
    """the most that the first steps held"""
    peak_bytes: int
    """likewise the last ones"""


def trained(bench: Bench, net: nn.Module, step: Step) -> Trained:
    """Of eight steps, the last three are measured."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seconds, first = [], 0
    bench.clean()
    for number in range(8):
        if number == 5:
            first = bench.peak_bytes()
            bench.clean()
        bench.wait()
        began = time.perf_counter()
        optimiser.zero_grad(set_to_none=False)
        step()
        bench.wait()
        seconds.append(time.perf_counter() - began)
        optimiser.step()
    gradients = (p.grad for p in net.parameters() if p.grad is not None)
    state = [t.detach().cpu() for t in (*net.parameters(), *net.buffers(), *gradients)]
    return Trained(state, seconds[5:], first, bench.peak_bytes())


SHARES = (2.0, 0.6, 0.4, 0.25)
"""of what a step holds without a budget; the first keeps everything"""
EXACT = (
    "budget", "same bits", "apart from torch", "first peak, of budget", "peak, of budget",
    "predicted, of the peak", "predicted, of the time", "time, of no budget", "bound", "seconds in all",
)  # fmt: skip


def exact(bench: Bench, name: str, times: int) -> str:
    """Steps under budgets beside those without, on so many times the images of the case for CPUs."""
    torch.backends.cudnn.deterministic = True
    case = CASES[name]
    shape, target = ((times * sizes[0], *sizes[1:]) for sizes in (case.shape, case.target))
    x, y, loss = Case(case.make, shape, target, case.blocks, 0).batch()
    x, y, net = x.to(bench.device), y.to(bench.device), case.make()
    own = copy.deepcopy(net).to(bench.device)
    free = trained(bench, own, plain(own, x, y, loss))
    own = None
    rows: list[tuple[str, ...]] = []
    kept: Trained | None = None
    for share in SHARES:
        told = "no time left"
        if not bench.over:
            budget = int(share * free.peak_bytes)
            try:
                own = copy.deepcopy(net).to(bench.device)
                kept, row = compared(bench, own, (x, y, loss), budget, free, kept)
                rows.append((f"{share}", *row))
                continue
            except UsageError as problem:
                told = str(problem)
            finally:
                own = None
                bench.clean()
        rows.append((f"{share}", told, *[""] * (len(EXACT) - 2)))
    size = f"{shape}, {free.peak_bytes / GIB:.1f} GiB without a budget"
    return f"### {name}, {size}, {_median(free.seconds)} s\n\n{table(EXACT, rows)}"


def compared(  # noqa: PLR0917
    bench: Bench,
    net: nn.Module,
    batch: tuple[Tensor, Tensor, nn.Module],
    budget: int,
    free: Trained,
    kept: Trained | None,
) -> tuple[Trained, tuple[str, ...]]:
    """Steps under a budget beside torch's, and beside those that keep everything; those, and a row."""
    began, (x, y, loss) = time.perf_counter(), batch
    under = under_budget(net, x.device, loss, budget)
    found = trained(bench, net, lambda: under.step(x, y))
    told = under.memory(x, y)
    assert told.choices is not None
    held = told.total_bytes + told.trained_bytes  # of the optimiser
    pairs = [
        pair for pair in zip(found.state, free.state, strict=True) if pair[0].is_floating_point()
    ]
    apart = max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)
    same = kept is None or all(map(torch.equal, found.state, kept.state))
    if bench.tables:
        print(told, flush=True)
    own_s, free_s = (statistics.median(one.seconds) for one in (found, free))
    figures = (
        found.first_bytes / budget, found.peak_bytes / budget, held / found.peak_bytes,
        told.choices.step_s / own_s, own_s / free_s, told.choices.bound_s / free_s,
    )  # fmt: skip
    taken = f"{time.perf_counter() - began:.1f}"
    row = ("yes" if same else "NO", f"{apart:.1e}", *(f"{one:.3f}" for one in figures), taken)
    return kept or found, row


def pixels(bench: Bench, left_gib: int, sizes: tuple[int, ...], times: list[int]) -> str:
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
    for number in (largest + n.bit_length() - 1 for n in times):
        size = sizes[min(number, len(sizes) - 1)]
        for name, make in ways(int(0.95 * left_gib * GIB), bench.device).items():
            if bench.over:
                rows.append((name, _square(size), "no time left", ""))
                continue
            taken = bench.seconds(make, net, *image(size, bench.device))
            _told(name, taken)
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
        _told(name, taken)
        compared = str(ratio(taken, base)) if taken and base else ""
        rows.append((name, _median(taken) if taken else "does not fit, or no time left", compared))
    del held
    header = ("way", "seconds, median", "of all memory")
    return f"### VGG-16, {count} samples in {left_gib} GiB\n\n{table(header, rows)}"


def _told(name: str, taken: list[float] | None) -> None:
    """As it happens, for those who end it early."""
    print(name, taken, file=sys.stderr, flush=True)


def _square(size: int) -> str:
    return f"{size} x {size}"


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f}"


def main() -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--parts", default="exact,filled")
    parser.add_argument("--nets", default="resnet50,unet,edsr,vgg16", help="of exact")
    parser.add_argument("--times", type=int, default=16, help="the images of a case, in exact")
    parser.add_argument("--tables", action="store_true", help="print choices, in exact")
    parser.add_argument(
        "--pixels", default="4,8", help="times those without a budget, powers of two"
    )
    parser.add_argument("--left", default="12,24,48", help="GiB")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: torch.cuda.is_available() is False")
    device, gpu = torch.device(asked.device), asked.device == "cuda"
    ends = time.monotonic() + 60 * asked.minutes
    bench = Bench(device, asked.rounds, ends, asked.tables)
    name = torch.cuda.get_device_name() if gpu else "a CPU, which tells nothing"
    print(
        f"{name}, torch {torch.__version__}, commit {environment()['commit']}; {GOALS}\n",
        flush=True,
    )
    parts = asked.parts.split(",")
    for net in asked.nets.split(",") if "exact" in parts else ():
        print(exact(bench, net, asked.times), end="\n\n", flush=True)
    for left_gib in map(int, asked.left.split(",")) if "filled" in parts else ():

        def ballast(left_gib: int = left_gib) -> Tensor:
            bench.clean()  # what is cached does not count as free
            size = max(torch.cuda.mem_get_info()[0] - left_gib * GIB, 0) if gpu else 0
            return torch.empty(size, dtype=torch.uint8, device=device)

        held = ballast()
        print(
            pixels(bench, left_gib, SIZES if gpu else TINY, [*map(int, asked.pixels.split(","))]),
            end="\n\n",
            flush=True,
        )
        del held
        if gpu:
            torch.cuda.empty_cache()
        print(samples(bench, left_gib, 256 if gpu else 2, ballast), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
