"""A small training run in which one rank misbehaves: traces, the hang watch and reports are tested with it.

    python faulty_training.py --fault loader --on 1 --steps 12

It is started with torchrun's variables (tests/faults.py) and traced where FIVEFOLD_TRACE says so. A fault
begins with step `--from`; those that hold a rank from outside (signals, control groups, the network) are not
in here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import fivefold as ff
from fivefold.plan import Comm
from fivefold.trace import active
from fivefold.train import fit

PER_RANK = 16
FAULTS = (
    "none", "loader", "layer", "backward", "update", "read", "once", "all_reduce", "other", "skip", "die",
)  # fmt: skip


class Fault:
    """What goes wrong, where and when."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.kind: str = told.fault
        self.here = int(os.environ["RANK"]) == told.on
        self.first: int = told.first
        self.seconds: float = told.seconds
        self.pipe: str = told.pipe
        self.training = True
        """not validating"""

    def now(self, *kinds: str) -> bool:
        trace = active()
        step = trace.step if trace is not None else 1
        begun = (
            step == self.first
            if self.kind in ("once", "all_reduce", "other", "skip")
            else step >= self.first
        )
        return self.here and self.training and self.kind in kinds and begun


class Pictures(Dataset[tuple[Tensor, int]]):
    """Made up; the first of a rank's samples may come late, or never."""

    def __init__(self, count: int, fault: Fault | None) -> None:
        self._count, self._fault = count, fault
        self._asked = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 24, 24, generator=draw)
        self._asked += 1
        if self._fault is not None and self._asked % PER_RANK == 1:
            self._read_late(self._fault)
        return picture, index % 4

    def _read_late(self, fault: Fault) -> None:
        if fault.now("loader"):
            time.sleep(fault.seconds)
        elif fault.now("read"):
            Path(fault.pipe).read_bytes()


class _Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    """Computes nothing; on one rank it takes its time, or calls what no other rank calls."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def forward(self, x: Tensor) -> Tensor:
        fault = self._fault
        if not self.training:
            return x
        if fault.now("layer", "once"):
            time.sleep(fault.seconds)
        elif fault.now("backward"):
            return _Slow.apply(x, fault.seconds)
        elif fault.now("all_reduce"):
            dist.all_reduce(torch.ones(3))
        elif fault.now("other"):
            dist.barrier()
        elif fault.now("die"):
            os.kill(os.getpid(), 9)
        return x


def told() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--on", type=int, default=-1)
    parser.add_argument("--from", dest="first", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--pipe", default="")
    parser.add_argument(
        "--gate", default="", help="folder whose files start and train are waited for"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--backend", default="fivefold")
    parser.add_argument("--timeout", type=float, default=60.0)
    return parser.parse_args()


def net(width: int, fault: Fault) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        Layer(fault),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 4),
    )  # fmt: skip


def wait_for(gate: str, name: str) -> None:
    """Whoever started us may do something to this process first."""
    print(f"at {name}", flush=True)
    end = time.monotonic() + 60
    while gate and not (Path(gate) / name).exists():
        assert time.monotonic() < end, f"nobody opens {gate}/{name}"
        time.sleep(0.005)


def main() -> None:
    options = told()
    wait_for(options.gate, "start")
    torch.set_num_threads(1)
    fault = Fault(options)
    comm = Comm(backend=options.backend, timeout_s=options.timeout)
    mesh = ff.start(ff.Plan(comm=comm))
    batch = PER_RANK * mesh.size
    model = ff.parallelize(net(options.width, fault), mesh, loss=nn.CrossEntropyLoss())
    train = ff.loader(Pictures(batch * options.steps, fault), mesh, batch_size=batch)
    test = ff.loader(Pictures(batch, None), mesh, batch_size=batch, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    wait_for(options.gate, "train")
    fit(model, optimizer, schedule, train, test, mesh=mesh, epochs=1)
    mesh.stop()
    print("done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
