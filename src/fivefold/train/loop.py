"""The training loop: epochs of phases, to be read in five minutes.

    each step    load -> forward, backward, reduce -> update        each epoch    validate -> report
                 loader  model.step                   optimiser

Nothing in a step waits for its loss to arrive. It is read when somebody looks: when the progress display is
due, and at the end of an epoch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fivefold.checkpoint import Checkpointer
from fivefold.data import Loader
from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.parallel import ParallelModel
from fivefold.plan import Numerics
from fivefold.trace import Phase, Recorder, active, recording, span
from fivefold.train.precision import Arithmetic
from fivefold.train.progress import Progress, Silent
from fivefold.train.run import Run
from fivefold.train.summary import EpochReport, Summary, by_phase
from fivefold.train.task import CLASSES, Task
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
    task: Task = CLASSES,
    numerics: Numerics | None = None,
    run: Run | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpointer | None = None,
) -> Summary:
    """Train a model from where `train` stands until `epochs` are complete. Collective.

    Args:
        model: what `parallelize` returned, with its loss.
        optimizer: over `model.parameters()`.
        schedule: stepped after every step of the optimiser.
        train: yields (images, targets): (n, channels, height, width), and for a classifier (n) int64.
        test: the same; one epoch of it is a validation.
        mesh: where all of them live.
        epochs: how many in all, those before `train.cursor` included.
        task: what is measured on the test data; accuracy by default.
        numerics: precision and memory format; the plan's by default.
        run: where the metrics go and, at the end, the weights.
        progress: who is told how far we are; on one rank, usually.
        checkpoints: asked to save after every step, and made to at the end.

    Raises:
        UsageError: `train` is at its end already.
        FivefoldError: the loss of an epoch is not a finite number.
    """
    if train.upcoming.epoch >= epochs:
        raise UsageError(f"nothing left to train: {train.upcoming} comes next, of {epochs} epochs")
    arithmetic = Arithmetic(numerics or mesh.plan.numerics, mesh.device)
    reports: list[EpochReport] = []
    with recording() as recorder, progress or Silent() as shown:
        loop = _Loop(
            model, optimizer, schedule, train, test, mesh, task, arithmetic, shown, checkpoints
        )
        if (trace := active()) is not None:
            trace.begin_at(train.cursor.step + 1)
        shown.begin(train.cursor.step, epochs * len(train), epochs)
        for epoch in range(train.upcoming.epoch, epochs):
            report = _epoch(loop, epoch, recorder)
            _check_finite(report)
            reports.append(report)
            shown.epoch(report)
            if run is not None:
                run.log(report.figures())
            _note(report)
    if checkpoints is not None:
        checkpoints.save(train.cursor.step)
    weights = model.full_state_dict()
    if run is not None:
        run.save_weights(weights)
    return Summary.of(reports)


@dataclass(frozen=True)
class _Loop:
    """What `fit` was given."""

    model: ParallelModel
    optimizer: Optimizer
    schedule: LRScheduler
    train: Loader
    test: Loader
    mesh: Mesh
    task: Task
    arithmetic: Arithmetic
    shown: Progress
    checkpoints: Checkpointer | None


def _epoch(loop: _Loop, epoch: int, recorder: Recorder) -> EpochReport:
    """Train what is left of an epoch, and validate."""
    begun, before = time.perf_counter(), by_phase(recorder)
    losses = _Losses()
    _train(loop, losses)
    trained = time.perf_counter()
    task = loop.task
    ask = None if loop.checkpoints is None else loop.checkpoints.poll
    test_loss, metric = validate(
        loop.model, loop.test, loop.mesh, loop.arithmetic, task, between=ask
    )
    report = EpochReport(
        epoch=epoch + 1,
        step=loop.train.cursor.step,
        images=losses.samples,
        learning_rate=loop.optimizer.param_groups[0]["lr"],
        loss=losses.mean(),
        test_loss=test_loss,
        accuracy=None,
        images_per_s=losses.samples / (trained - begun),
        epoch_s=time.perf_counter() - begun,
        phases_s={k: s - before.get(k, 0.0) for k, s in by_phase(recorder).items()},
    )
    return replace(report, **{task.metric: metric})


def _train(loop: _Loop, losses: _Losses) -> None:
    begun = time.perf_counter()
    loop.model.train()
    for images, targets in loop.train:
        with loop.arithmetic.autocast():
            loss = loop.model.step(loop.arithmetic.images(images), targets)
        with span(Phase.UPDATE):
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.schedule.step()
        losses.add(loss, _of_all_ranks(targets))
        if (trace := active()) is not None:
            trace.step_ended(samples=len(images))
        if loop.checkpoints is not None:
            loop.checkpoints.maybe_save(loop.train.cursor.step)
        if loop.shown.due():
            rate = losses.samples / (time.perf_counter() - begun)
            mean = losses.mean()
            loop.shown.step(loop.train.cursor, mean, rate)
            if (trace := active()) is not None:
                trace.note("loss", step=loop.train.cursor.step, value=mean)


def _note(report: EpochReport) -> None:
    """Tell the trace what the epoch gave."""
    trace = active()
    if trace is None:
        return
    figures = report.figures()
    trace.note("loss", step=report.step, value=report.loss)
    for name in ("test_loss", "accuracy", "psnr_db", "images_per_s"):
        if figures.get(name) is not None:
            trace.note("metric", step=report.step, name=name, value=figures[name])


def _check_finite(report: EpochReport) -> None:
    if not math.isfinite(report.loss + report.test_loss):
        raise FivefoldError(
            f"training diverged: in epoch {report.epoch} the mean loss was {report.loss:.3g}, on the test "
            f"data {report.test_loss:.3g}; a smaller train.learning_rate or a longer train.warmup_epochs "
            "usually helps"
        )


def _of_all_ranks(targets: Tensor) -> int:
    part = part_of(targets)
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
