"""One contender: builds everything, then runs blocks of training steps when it is told to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.recipes.models import build

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve, timed

CLASSES = 10
POOL = 4
"""different batches, made beforehand and used in turn: no loader takes part in the comparison"""


@dataclass(frozen=True)
class Setting:
    """What all contenders have in common."""

    model: str
    batch: int
    """images of the global batch"""
    image: int
    """pixels along each side"""
    device: torch.device
    channels_last: bool
    bfloat16: bool

    def net(self) -> nn.Module:
        """The model, initialised alike in every contender."""
        torch.manual_seed(0)
        net = build(self.model, CLASSES).to(self.device)
        if self.channels_last:
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return net

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Global batches, laid out as the net is."""
        draw = torch.Generator().manual_seed(1)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        found: list[tuple[Tensor, Tensor]] = []
        for _ in range(POOL):
            images = torch.randn(self.batch, 3, self.image, self.image, generator=draw)
            labels = torch.randint(CLASSES, (self.batch,), generator=draw)
            images = images.to(self.device).contiguous(memory_format=layout)
            found.append((images, labels.to(self.device)))
        return found

    def autocast(self) -> torch.autocast:
        """Surrounds the forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        """What the recipes train with."""
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def plain(setting: Setting) -> Callable[[], None]:
    """Torch alone, one process."""
    return _loop(setting, setting.net(), setting.batches())


def ddp(setting: Setting) -> Callable[[], None]:
    """Torch's own data parallelism with its defaults, started by torchrun."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpu = setting.device.type == "cuda"
    # NCCL wants a GPU for every rank.
    dist.init_process_group("nccl" if gpu and ranks <= torch.cuda.device_count() else "gloo")
    net = DistributedDataParallel(setting.net(), device_ids=[local_gpu(local)] if gpu else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * setting.batch // size, (rank + 1) * setting.batch // size)
    return _loop(setting, net, [(x[rows], y[rows]) for x, y in setting.batches()])


def _loop(
    setting: Setting, net: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    optimiser, criterion, source = setting.optimiser(net), nn.CrossEntropyLoss(), cycle(batches)

    def step() -> None:
        images, labels = next(source)
        optimiser.zero_grad()
        with setting.autocast():
            loss = criterion(net(images), labels)
        loss.backward()
        optimiser.step()

    return step


def fivefold(
    setting: Setting,
    batch_norm: Literal["global", "replica"],
    backend: Literal["gloo", "fivefold"] = "gloo",
) -> Callable[[], None]:
    """Fivefold, started by `fivefold run`; by default with DDP's backend, to compare all but that."""
    import fivefold as ff
    from fivefold.plan import Comm, Parallel

    comm = Comm(backend=backend) if setting.device.type == "cpu" else Comm()
    mesh = ff.start(ff.Plan(parallel=Parallel(batch_norm), comm=comm), device=setting.device)
    model = ff.parallelize(setting.net(), mesh, loss=nn.CrossEntropyLoss())
    optimiser, source = (
        setting.optimiser(model),
        cycle([model.shard(*b) for b in setting.batches()]),
    )

    def step() -> None:
        images, labels = next(source)
        optimiser.zero_grad()
        with setting.autocast():
            model.step(images, labels)
        optimiser.step()

    return step


CONTENDERS: dict[str, Callable[[Setting], Callable[[], None]]] = {
    "alone": plain,
    "single": plain,
    "ddp": ddp,
    "ddp-heap": ddp,
    "replica": lambda setting: fivefold(setting, "replica"),
    "exact": lambda setting: fivefold(setting, "global"),
    "exact-shared": lambda setting: fivefold(setting, "global", "fivefold"),
}


def local_gpu(local_rank: int) -> int:
    """The GPU of a rank; ranks share them in turn if there are too few."""
    return local_rank % torch.cuda.device_count()


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--socket", required=True, help="where run.py listens")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variant", default="fp32", help="fp32 or bf16, then -channels_last if so")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first block")
    return parser.parse_args()


def main() -> None:
    """Build, warm up, and serve blocks until the socket closes."""
    asked = options()
    device = torch.device("cpu")
    if asked.device == "cuda":
        device = torch.device("cuda", local_gpu(int(os.environ.get("LOCAL_RANK", "0"))))
        torch.cuda.set_device(device)
    precision, _, layout = asked.variant.partition("-")
    setting = Setting(
        model=asked.model,
        batch=asked.batch,
        image=asked.image,
        device=device,
        channels_last=layout == "channels_last",
        bfloat16=precision == "bf16",
    )
    step = CONTENDERS[asked.contender](setting)
    timed(step, asked.warm_up, device)
    serve(asked.socket, lambda steps: {"step_s": timed(step, steps, device)}, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
