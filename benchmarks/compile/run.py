"""Training steps whose graphs are compiled, beside the same steps as they are, and beside torch alone.

    python benchmarks/compile/run.py [--nets resnet50,vit] [--layouts data=1,width=2]

For each net and layout a job of its own holds all ways in each rank; they take turns, step by step. Torch
alone is `torch.compile` in one process, and DistributedDataParallel over the compiled net with `data=2`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment, ratio, table
from publishing import Page, conditions
from rounds import order

import fivefold as ff
from fivefold.plan import Layout, Plan, Provenance
from fivefold.recipes.models.resnet import resnet50
from fivefold.recipes.models.unet import unet

HERE = Path(__file__).resolve().parent
REPLICA = "data=2 replica"
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "data=1": (Layout(), {}),
    "data=2": (Layout(data=2), {}),
    REPLICA: (Layout(data=2), {"parallel.batch_norm": "replica"}),
    "width=2": (Layout(width=2), {}),
    "pipe=2": (Layout(pipe=2), {"pipeline.micro_batches": 2, "pipeline.schedule": "1f1b"}),
}
"""and what else their plans say"""
AS_IT_IS, COMPILED, TORCH = "as it is", "compiled", "torch alone, compiled"
WARM = 3
"""steps: watched, compiled, run"""
Step = Callable[[], Any]


class Vit(nn.Module):
    """Patches of 16 x 16 pixels, layers of attention, the mean of them."""

    def __init__(self, width: int = 192, layers: int = 12, heads: int = 3, side: int = 14) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(1, side * side, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)"""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Case:
    """A net, and a batch of all ranks."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target: tuple[int, ...]


CASES = {
    "resnet50": Case(resnet50, (8, 3, 128, 128), (8,)),
    "unet": Case(lambda: unet(width=32), (4, 3, 96, 96), (4, 96, 96)),
    "vit": Case(Vit, (8, 3, 224, 224), (8,)),
    "tiny": Case(lambda: Vit(8, 1, 2, 2), (4, 3, 32, 32), (4,)),
}
"""the last one tries the script"""


# ---- in a rank


def rank(net_name: str, layout_name: str, rounds: int, out: Path) -> None:
    """Be one; the first rank writes what was measured."""
    layout, words = LAYOUTS[layout_name]
    plan = Plan(layout=layout).replace(words, Provenance("user", "benchmark"))
    warnings.simplefilter("ignore")  # of a compiled net that is taken as it was
    with ff.start(plan) as mesh:
        ways = steps(CASES[net_name], mesh, layout)
        first_s = {name: sum(timed(step) for _ in range(WARM)) for name, step in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in order([*ways], number):
                seconds[name].append(timed(ways[name]))
        if mesh.rank == 0:
            out.write_text(json.dumps({"seconds": seconds, "first_s": first_s}))


def timed(step: Step) -> float:
    """Seconds of a step of all ranks."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    step()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def steps(case: Case, mesh: ff.Mesh, layout: Layout) -> dict[str, Step]:
    """All ways, by name."""
    torch.manual_seed(0)
    net, loss = case.make(), nn.CrossEntropyLoss()
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(case.shape, generator=draw),
        torch.randint(0, 10, case.target, generator=draw),
    )

    def fivefold(given: nn.Module) -> Step:
        model = ff.parallelize(given, mesh, example=x, loss=loss)
        batch = model.shard(x, y)

        def step() -> None:
            model.zero_grad()
            model.step(*batch)

        return step

    compiled: Any = torch.compile(copy.deepcopy(net))
    found = {AS_IT_IS: fivefold(copy.deepcopy(net)), COMPILED: fivefold(compiled)}
    if layout.tiles * layout.pipe == 1:
        found[TORCH] = alone(torch.compile(net), loss, x, y, layout.data)  # type: ignore[arg-type]
    return found


def alone(net: Any, loss: nn.Module, x: Tensor, y: Tensor, ranks: int) -> Step:
    """Torch's own; batch norm is each replica's then, which is less work than ours but for `REPLICA`."""
    if ranks > 1:
        net = nn.parallel.DistributedDataParallel(net)
        mine = slice(dist.get_rank(), None, ranks)
        x, y = x[mine], y[mine]

    def step() -> None:
        net.zero_grad()
        loss(net(x), y).backward()

    return step


# ---- around the ranks


def measured(part: str, layouts: list[str], rounds: int) -> dict[str, Any]:
    """One net under all layouts."""
    before, found = environment(), dict[str, Any]()
    norms = any(isinstance(one, nn.BatchNorm2d) for one in CASES[part].make().modules())
    for name in layouts if norms else [one for one in layouts if one != REPLICA]:
        ranks = LAYOUTS[name][0].size
        with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
            out = Path(folder) / "told.json"
            command = [
                sys.executable,
                "-m",
                "fivefold",
                "run",
                "-n",
                str(ranks),
                "--log-dir",
                folder,
            ]
            own = [__file__, "--rank", part, name, str(out), "--rounds", str(rounds)]
            threads = str(max((os.cpu_count() or 1) // ranks, 1))
            fresh = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
            subprocess.run([*command, *own], check=True, env={**os.environ, **fresh})
            found[name] = json.loads(out.read_text())
            print(f"{part} {name}: {_rows(part, name, found[name])}", flush=True)
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return {"benchmark": "compile", "part": part, "rounds": rounds, "found": found,
            "environment": {**before, **more}}  # fmt: skip


def section(result: dict[str, Any]) -> str:
    """A table of one net."""
    part = result["part"]
    rows = [row for name, told in result["found"].items() for row in _rows(part, name, told)]
    header = (
        "layout",
        "way",
        "seconds, median",
        "of as it is",
        "of torch alone",
        "first three steps, s",
    )
    return f"### {part}, {CASES[part].shape}, compiled\n\n{table(header, rows)}\n\n{conditions(result)}"


def _rows(_part: str, name: str, told: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for way, seconds in told["seconds"].items():
        torchs = told["seconds"].get(TORCH)
        rows.append((
            name, way, f"{statistics.median(seconds):.3f}", str(ratio(seconds, told["seconds"][AS_IT_IS])),
            "" if torchs is None else str(ratio(seconds, torchs)), f"{told['first_s'][way]:.1f}",
        ))  # fmt: skip
    return rows


PAGE = Page(HERE, section, tuple(CASES)[:-1])


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=",".join(PAGE.order))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=PAGE.home / "results")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        net, layout, out = asked.rank
        rank(net, layout, asked.rounds, Path(out))
        return 0
    nets, layouts = asked.nets.split(","), asked.layouts.split(",")
    for valid, words in ((CASES, nets), (LAYOUTS, layouts)):
        if strange := [word for word in words if word not in valid]:
            parser.error(f"there is no {strange[0]}; valid: {', '.join(valid)}")
    return PAGE.publish(nets, lambda part: measured(part, layouts, asked.rounds), asked.results)


if __name__ == "__main__":
    sys.exit(main())
