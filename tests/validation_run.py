"""Training with a validator, as tests run it: in trainers and in helpers, forked by `helping.Nursery`."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fivefold as ff
from fivefold.checkpoint import Checkpointer
from fivefold.data import Cursor
from fivefold.errors import OffloadWarning
from fivefold.helpers.dispatcher import Dispatcher
from fivefold.offload import BestSoFar, EarlyStopping, Plateau, Result
from fivefold.plan import Layout, Plan
from fivefold.train import RunDirectory, fit, warmup_cosine
from fivefold.train.progress import Silent
from fivefold.train.task import CLASSES as CLASSIFIER
from fivefold.train.validation import validator as validator_of

CLASSES, PIXELS, TESTS, BATCH = 5, 12, 61, 8


class Images:
    """Images that are functions of their index; some take their time, some cannot be read by helpers."""

    def __init__(self, length: int, slow_s: float = 0.0, bad: int = -1) -> None:
        self.length, self.slow_s, self.bad = length, slow_s, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.bad and os.environ.get("FIVEFOLD_ROLE") == "helper":
            raise ValueError("no such image here")
        time.sleep(self.slow_s)
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        return torch.randn(3, PIXELS, PIXELS, generator=generator) + label, label


class Net(nn.Module):
    """Convolution, batch norm, dropout, and products of matrices, whose bits depend on the threads."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Linear(8 * PIXELS * PIXELS, width)
        self.head = nn.Linear(width, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(images))).flatten(1)
        return self.head(self.drop(F.relu(self.wide(hidden))))


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs.float(), targets, reduction="sum").double()
    correct = (outputs.argmax(1) == targets).sum().double()
    return torch.stack([loss, correct, loss.new_tensor(len(targets))])


def figures(sums: Any) -> dict[str, float]:
    return {"loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]}


def plain_sums(state: dict[str, Tensor]) -> list[float]:
    """What plain PyTorch makes of the same weights and batches, added one after the other."""
    net, images = Net(), Images(TESTS)
    net.load_state_dict(state)
    net.eval()
    total = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for start in range(0, TESTS, BATCH):
            samples = [images[i] for i in range(start, min(start + BATCH, TESTS))]
            inputs, labels = (
                torch.stack([x for x, _ in samples]),
                torch.tensor([y for _, y in samples]),
            )
            total = [a + b for a, b in zip(total, score(net(inputs), labels).tolist(), strict=True)]
    return total


def train(
    out: str,
    *,
    epochs: int = 3,
    delay: int = 1,
    threads: int = 1,
    wait: int = 0,
    warned: str = "",
    rank: int = 0,
    ranks: int = 1,
    layout: str = "",
    evaluated_before: int = -1,
    **net_and_data: Any,
) -> None:
    """What a script does. Rank 0 writes `out`: the results, and what else is of interest.

    A trainer waits for `wait` helpers first, and for a warning that says `warned`; before each epoch for a
    file OUT.EPOCH, and before the epoch `evaluated_before` until helpers have evaluated what was submitted.
    """
    torch.set_num_threads(threads)
    fields: list[str] = []
    warnings.showwarning = lambda message, *_, **__: fields.append(str(message))
    warnings.simplefilter("always", OffloadWarning)
    helps = os.environ.get("FIVEFOLD_ROLE") == "helper"
    if ranks > 1 and not helps:
        store = dist.FileStore(f"{out}.store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = ff.start(Plan(layout=Layout(**json.loads(layout))) if layout else None)
    model, data, tests, optimizer = _made(mesh, **net_and_data)
    validator = ff.Validator(model, tests, score=score, figures=figures, delay=delay)
    seen = _Seen(optimizer)
    _await(lambda: helps or rank or validator.helpers >= wait)
    _await(lambda: helps or _is_warned(mesh, fields, warned))
    Path(f"{out}.{'helps' if helps else 'begun'}").touch()
    for epoch in range(epochs):
        _await(lambda epoch=epoch: helps or Path(f"{out}.{epoch}").exists())
        _await(lambda epoch=epoch: helps or epoch != evaluated_before or _evaluated(validator))
        model.train()
        for images, labels in data:
            model.step(images, labels)
            optimizer.step()
            optimizer.zero_grad()
        seen.take(validator.submit(epoch, data.cursor.step), epoch)
    seen.take(validator.finish(), epochs)
    validator.close()
    final = [float(p.double().sum()) for p in model.full_state_dict().values()]
    if rank == 0:
        text = json.dumps({"results": seen.found, "final": final, "warnings": fields})
        Path(f"{out}.partial").write_text(text)
        Path(f"{out}.partial").replace(out)
    _close_desk(mesh)


def _evaluated(validator: ff.Validator) -> bool:
    works = [one.work for one in validator._under_way]  # pyright: ignore[reportPrivateUsage]
    return all(work is not None and work.slices.complete for work in works)


def _made(mesh: ff.Mesh, width: int = 512, slow_s: float = 0.0, bad: int = -1) -> Any:
    torch.manual_seed(1)
    example = torch.empty(20, 3, PIXELS, PIXELS, device="meta")
    model = ff.parallelize(Net(width), mesh, example=example, loss=nn.CrossEntropyLoss())
    data = ff.loader(Images(80), mesh, batch_size=20)
    tests = ff.loader(Images(TESTS, slow_s, bad), mesh, batch_size=BATCH, shuffle=False)
    return model, data, tests, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class _Seen:
    """Results, what plain PyTorch makes of their weights, and what was decided by them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.found: list[dict[str, Any]] = []
        # Lowers the rate whenever it may, so that a decision made at another time changes the weights.
        lower = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=1e9)
        self._decide = (
            BestSoFar("accuracy"),
            EarlyStopping("loss", patience=9, better="min"),
            Plateau(lower, "loss"),
        )

    def take(self, results: list[Result], at: int) -> None:
        for result in results:
            self.found.append(
                {
                    "epoch": result.epoch,
                    "step": result.step,
                    "at": at,
                    "sums": _hex(result.sums),
                    "plain": _hex(plain_sums(result.state_dict())),
                    "by_helpers": result.by_helpers,
                    "decided": [decides.update(result) for decides in self._decide],
                }
            )


class Stopping(Silent):
    """Sends this process a signal after some steps; all saves are there by then."""

    def __init__(self, after: int, what: int, saves: Checkpointer) -> None:
        self.after, self.what, self.saves = after, what, saves

    def due(self) -> bool:
        return True

    def step(self, cursor: Cursor, loss: float, images_per_s: float) -> None:  # noqa: ARG002
        if cursor.step == self.after:
            self.saves.wait()
            os.kill(os.getpid(), self.what)


def fit_until_stopped(
    out: str, *, wait: int = 0, after: int = 6, what: int = signal.SIGTERM, every: int = 0
) -> None:
    """Train by `fit` with checkpoints, from where they are, and be stopped; 4 steps are an epoch."""
    mesh = ff.start()
    model, data, tests, optimizer = _made(mesh, slow_s=0.005)
    schedule = warmup_cosine(optimizer, steps=12, warmup=1)
    checked = validator_of(model, tests, CLASSIFIER, mesh.plan.numerics)
    _await(lambda: mesh.role == "helper" or checked.helpers >= wait)
    with Checkpointer(
        f"{out}.saves", mesh, local=f"{out}.local", every=every,
        model=model, optim=optimizer, schedule=schedule, data=data, validator=checked,
    ) as saves:  # fmt: skip
        saves.load()
        run = RunDirectory.create(out, "run", mesh)
        try:
            fit(
                model, optimizer, schedule, data, tests, mesh=mesh, epochs=3, run=run,
                checkpoints=saves, validator=checked, progress=Stopping(after, what, saves),
            )  # fmt: skip
        except SystemExit as end:
            Path(f"{out}.code").write_text(str(end.code))
    _close_desk(mesh)


def _hex(sums: Any) -> list[str]:
    return [float(value).hex() for value in sums]


def _await(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def _is_warned(mesh: ff.Mesh, fields: list[str], what: str) -> bool:
    if dispatcher := Dispatcher.of(mesh):
        dispatcher.tell()
    return not what or any(what in text for text in fields)


def _close_desk(mesh: ff.Mesh) -> None:
    """A forked process ends without its exit handlers."""
    dispatcher = Dispatcher.of(mesh)
    if dispatcher is not None:
        dispatcher.close()
