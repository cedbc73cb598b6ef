"""Ways to hold less in a training step: each makes a step of one net on one batch."""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fivefold as ff
from fivefold.parallel import ParallelModel
from fivefold.parallel.program.net import no_budget
from fivefold.plan import Provenance
from fivefold.recipes.models.edsr import edsr
from fivefold.recipes.models.resnet import resnet50
from fivefold.recipes.models.unet import unet
from fivefold.recipes.models.vgg import vgg16_bn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tiles"))

from live import Live

Step = Callable[[], Tensor]
SAME = "the same, once more"
"""beside itself, a choice tells how far apart equal ones are"""


@dataclass(frozen=True)
class Case:
    """A net and a batch."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target: tuple[int, ...]
    """of classes, or of pixels that are compared"""
    blocks: tuple[str, ...]
    """classes of modules that a competent user checkpoints"""
    cache_bytes: int
    """of page cache for a way that writes through it"""

    def batch(self) -> tuple[Tensor, Tensor, nn.Module]:
        """Inputs, targets and the loss."""
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        if len(self.target) == len(self.shape):
            return x, torch.randn(self.target), nn.MSELoss()
        return x, torch.randint(0, 10, self.target), nn.CrossEntropyLoss()


CASES = {
    "resnet50": Case(resnet50, (8, 3, 224, 224), (8,), ("_Bottleneck",), 128 << 20),
    "unet": Case(
        lambda: unet(width=32), (8, 3, 128, 128), (8, 128, 128), ("Sequential", "_TransposedUp"), 48 << 20
    ),
    "edsr": Case(lambda: edsr(classes=3), (4, 3, 64, 64), (4, 3, 128, 128), ("_Block",), 48 << 20),
    "vgg16": Case(lambda: vgg16_bn(hidden=512), (4, 3, 224, 224), (4,), ("Sequential",), 256 << 20),
}  # fmt: skip


def plain(net: nn.Module, case: Case) -> Step:
    """Torch as it is."""
    x, y, loss = case.batch()

    def step() -> Tensor:
        made = loss(net(x), y)
        made.backward()
        return made.detach()

    return step


def checkpointed(net: nn.Module, case: Case) -> Step:
    """Each block is computed again."""
    per_block(net, case.blocks)
    return plain(net, case)


def per_block(net: nn.Module, blocks: tuple[str, ...]) -> None:
    """Checkpoint the modules of these classes."""
    for module in net.modules():
        if type(module).__name__ in blocks and module is not net:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def on_disk(net: nn.Module, case: Case, folder: Path) -> Step:
    """All that is saved is written to a file at once, and read when backward needs it."""
    file, ends = os.open(folder, os.O_TMPFILE | os.O_RDWR), [0]
    step, own = plain(net, case), {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in own or tensor.nbytes < 1 << 16:
            return tensor
        flat, at = tensor.detach().contiguous().view(-1), ends[0]
        ends[0] += os.pwrite(file, flat.view(torch.uint8).numpy().data, at)
        return at, tensor.shape, tensor.dtype

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        at, shape, dtype = packed
        made = torch.empty(shape, dtype=dtype)
        os.preadv(file, [made.view(-1).view(torch.uint8).numpy().data], at)
        return made

    def spilling() -> Tensor:
        ends[0] = 0
        with saved_tensors_hooks(pack, unpack):
            return step()

    return spilling


class Budgeted:
    """`memory.budget` for so much, beside what is there before a step."""

    def __init__(self, net: nn.Module, case: Case, most_bytes: int, disk: Path | None) -> None:
        """Raises `ValueError` where that is too little, with the least that works."""
        x, y, loss = case.batch()
        told = recorded(net, loss, "1TiB", None).memory(x, y)
        standing = told.total_bytes - told.peak_bytes + 2 * told.trained_bytes
        budget = f"{standing + most_bytes}B"
        self.model = recorded(net, loss, budget, disk)
        self._batch = (x, y)

    def __call__(self) -> Tensor:
        """A step; gradients are added to those that are there, as in the other ways."""
        return self.model.step(*self._batch)

    def told(self) -> dict[str, float]:
        """What was predicted of a step."""
        told = self.model.memory(*self._batch)
        assert told.choices is not None
        names = ("step_s", "free_s", "bound_s")
        return {"peak_bytes": told.peak_bytes, **{n: getattr(told.choices, n) for n in names}}


def recorded(net: nn.Module, loss: nn.Module, budget: str, disk: Path | None) -> ParallelModel:
    """A copy of a net under a budget."""
    words = {"memory.budget": budget, **({"memory.disk": str(disk)} if disk else {})}
    mesh = ff.start(ff.Plan().replace(words, Provenance("user", "benchmark")))
    return ff.parallelize(copy.deepcopy(net), mesh, loss=loss)


def in_segments(net: nn.Module, case: Case) -> Step:
    """`memory.recompute = "auto"`, as in tiles and stages: as many segments as each has steps."""
    x, y, loss = case.batch()
    model = recorded(net, loss, "1TiB", None)
    model.step(x, y)
    tiles: Any = _within(model).recorded
    vars(tiles[0]).update(budgeted=no_budget, _recompute="auto")
    return lambda: model.step(x, y)


def _within(model: Any) -> Any:
    """What no user sees."""
    return vars(model)["_memory"]


def steps(name: str, part: float, folder: Path) -> tuple[dict[str, Step], dict[str, str]]:
    """All ways on one net, by name; and those that refuse, and why."""
    case = CASES[name]
    torch.manual_seed(0)
    net = case.make()
    free = plain(copy.deepcopy(net), case)
    most_bytes = int(part * peak_bytes(free))
    ways: dict[str, Step] = {
        "no budget": free,
        "checkpoint per block": checkpointed(copy.deepcopy(net), case),
        'recompute = "auto"': in_segments(net, case),
        "everything to disk by hooks": on_disk(copy.deepcopy(net), case, folder),
    }
    refused: dict[str, str] = {}
    for way, disk in (("memory.budget", None), ("memory.budget, with a disk", folder)):
        try:
            ways[way] = Budgeted(net, case, most_bytes, disk)
            ways[way]()
        except ValueError as problem:
            ways.pop(way, None)
            refused[way] = str(problem).partition("holds ")[2].partition(",")[0]
    return ways, refused


class _Other(Budgeted):
    """Another choice that fits: what would be best if times were other ones."""

    def __init__(self, net: nn.Module, case: Case, most_bytes: int, disk: Path, seed: int) -> None:
        super().__init__(net, case, most_bytes, disk)
        budget = vars(_within(self.model))["_budget"]
        choose, rng = budget.choose, random.Random(seed)

        def otherwise(decision: Any, rehearsed: Any) -> None:
            profile = decision.profile
            shaken = [s * rng.choice([0.25, 0.5, 1, 2, 4]) for s in profile.seconds]
            decision.profile = profile.timed(shaken, [2 * s for s in shaken])
            choose(decision, rehearsed)
            decision.profile = profile

        budget.choose = otherwise


def alternatives(name: str, part: float, folder: Path, others: int) -> dict[str, Step]:
    """The choice that is made, and others."""
    case = CASES[name]
    torch.manual_seed(0)
    net = case.make()
    most_bytes = int(part * peak_bytes(plain(copy.deepcopy(net), case)))
    own = Budgeted(net, case, most_bytes, folder)
    made: dict[str, Step] = {"memory.budget, with a disk": own, SAME: own}
    for seed in range(others):
        made[f"other {seed}"] = _Other(net, case, most_bytes, folder, seed)
    return made


def peak_bytes(step: Step) -> int:
    """The most that is alive in a step, of what it makes."""
    for _ in range(4):  # decided, recorded, timed
        step()
    with Live() as live:
        step()
    return live.peak_bytes


def decided_s(size: int) -> float:
    """Seconds to decide for ResNet-50 and one square image, at half of the memory."""
    net, loss = resnet50(), nn.CrossEntropyLoss()
    x, y = torch.empty(1, 3, size, size, device="meta"), torch.zeros(1, dtype=torch.long)
    free = recorded(net, loss, "100TiB", None).memory(x, y)
    model = recorded(net, loss, f"{free.total_bytes - free.peak_bytes // 2}B", None)
    began = time.perf_counter()
    model.memory(x, y)
    return time.perf_counter() - began
