"""The training loop: epochs of phases, to be read in five minutes.

    each step    load -> forward, backward, reduce -> update        each epoch    validate -> report
                 loader  model.step                   optimiser

Nothing in a step waits for its loss to arrive. It is read when somebody looks: when the progress display is
due, and at the end of an epoch.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fivefold.data import Loader
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.parallel import ParallelModel
from fivefold.plan import Numerics
from fivefold.trace import Phase, recording, span
from fivefold.train.precision import Arithmetic
from fivefold.train.progress import Progress, Silent
from fivefold.train.run import Run
from fivefold.train.summary import EpochReport, Summary, by_phase
from fivefold.train.validation import validate

__all__ = ["fit"]


def fit(
    model: ParallelModel,
    optimizer: Optimizer,
    schedule: LRScheduler,
    train: Loader,
    test: Loader,
    *,
    mesh: Mesh,
    epochs: int,
    numerics: Numerics | None = None,
    run: Run | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Train a classifier from where `train` stands until `epochs` are complete. Collective.

    Args:
        model: what `parallelize` returned, with its loss.
        optimizer: over `model.parameters()`.
        schedule: stepped after every step of the optimiser.
        train: yields (images, labels): (n, channels, height, width), and (n) int64.
        test: the same; one epoch of it is a validation.
        mesh: where all of them live.
        epochs: how many in all, those before `train.cursor` included.
        numerics: precision and memory format; the plan's by default.
        run: where the metrics go and, at the end, the weights.
        progress: who is told how far we are; on one rank, usually.

    Raises `UsageError` when `train` is at its end already.
    """
    if train.upcoming.epoch >= epochs:
        raise UsageError(f"nothing left to train: {train.upcoming} comes next, of {epochs} epochs")
    arithmetic = Arithmetic(numerics or mesh.plan.numerics, mesh.device)
    reports: list[EpochReport] = []
    images = 0
    with recording() as recorder, progress or Silent() as shown:
        shown.begin(train.cursor.step, epochs * len(train), epochs)
        for epoch in range(train.upcoming.epoch, epochs):
            begun, before = time.perf_counter(), by_phase(recorder)
            losses = _Losses()
            _train(
                model,
                train,
                losses,
                shown,
                optimizer=optimizer,
                schedule=schedule,
                arithmetic=arithmetic,
            )
            trained = time.perf_counter()
            test_loss, accuracy = validate(model, test, mesh, arithmetic)
            report = EpochReport(
                epoch=epoch + 1,
                step=train.cursor.step,
                learning_rate=optimizer.param_groups[0]["lr"],
                loss=losses.mean(),
                test_loss=test_loss,
                accuracy=accuracy,
                images_per_s=losses.samples / (trained - begun),
                epoch_s=time.perf_counter() - begun,
                phases_s={k: s - before.get(k, 0.0) for k, s in by_phase(recorder).items()},
            )
            reports.append(report)
            images += losses.samples
            shown.epoch(report)
            if run is not None:
                run.log(asdict(report))
    if run is not None:
        run.save_weights(model.module)
    return Summary.of(reports, images)


def _train(
    model: ParallelModel,
    train: Loader,
    losses: _Losses,
    shown: Progress,
    *,
    optimizer: Optimizer,
    schedule: LRScheduler,
    arithmetic: Arithmetic,
) -> None:
    """What is left of one epoch."""
    model.train()
    begun = time.perf_counter()
    for images, labels in train:
        with arithmetic.autocast():
            loss = model.step(arithmetic.images(images), labels)
        with span(Phase.UPDATE):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.add(loss, _of_all_ranks(labels))
        if shown.due():
            rate = losses.samples / (time.perf_counter() - begun)
            shown.step(train.cursor, losses.mean(), rate)


def _of_all_ranks(labels: Tensor) -> int:
    part = part_of(labels)
    assert part is not None, "the loader notes on every tensor which part it is"
    return part.shape[0]


class _Losses:
    """The mean loss of an epoch's samples. Adding a step's loss does not wait for it; reading does."""

    def __init__(self) -> None:
        self.samples = 0
        self._sum = 0.0
        self._unread: list[tuple[Tensor, int]] = []

    def add(self, loss: Tensor, samples: int) -> None:
        self.samples += samples
        self._unread.append((loss, samples))

    def mean(self) -> float:
        self._sum += sum(float(loss) * samples for loss, samples in self._unread)
        self._unread.clear()
        return self._sum / self.samples
