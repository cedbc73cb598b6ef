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
from fivefold.offload.results import Result
from fivefold.offload.validator import Validator
from fivefold.parallel import ParallelModel
from fivefold.plan import Numerics
from fivefold.trace import Phase, Recorder, active, recording, span
from fivefold.train.precision import Arithmetic
from fivefold.train.progress import Progress, Silent
from fivefold.train.run import RunDirectory
from fivefold.train.summary import EpochReport, Summary, by_phase
from fivefold.train.task import CLASSES, Task
from fivefold.train.validation import validator as made_for

__all__ = ["fit", "is_trained"]


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
    run: RunDirectory | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpointer | None = None,
    validator: Validator | None = None,
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
        validator: of `task` on `test`, as `fivefold.train.validation.validator` makes it; made here if the
            script has none. Where helpers evaluate, an epoch is reported when its figures are due. One that
            `checkpoints` saves makes good what the save came before, also where all is trained.

    Raises:
        UsageError: `train` is at its end already.
        FivefoldError: the loss of an epoch is not a finite number.
    """
    numerics = numerics or mesh.plan.numerics
    arithmetic = Arithmetic(numerics, mesh.device)
    validator = validator or made_for(model, test, task, numerics)
    if is_trained(train, validator, epochs):
        raise UsageError(f"nothing left to train: {train.upcoming} comes next, of {epochs} epochs")
    validator.between = None if checkpoints is None else checkpoints.poll
    with recording() as recorder, progress or Silent() as shown:
        loop = _Loop(
            model, optimizer, schedule, train, validator, arithmetic, recorder, shown, checkpoints
        )
        reports = _Reports(task, shown, run)
        if (trace := active()) is not None:
            trace.begin_at(train.cursor.step + 1)
        shown.begin(train.cursor.step, epochs * len(train), epochs)
        _epochs(loop, epochs, reports)
    if checkpoints is not None:
        checkpoints.save(train.cursor.step)
    weights = model.full_state_dict()
    if run is not None:
        run.save_weights(weights)
    return Summary.of(reports.told)


@dataclass(frozen=True)
class _Loop:
    """What `fit` was given."""

    model: ParallelModel
    optimizer: Optimizer
    schedule: LRScheduler
    train: Loader
    validator: Validator
    arithmetic: Arithmetic
    recorder: Recorder
    shown: Progress
    checkpoints: Checkpointer | None


def is_trained(train: Loader, validator: Validator, epochs: int) -> bool:
    """Whether `fit` would have nothing left to do."""
    return _first(train, validator) >= epochs and not validator.waiting


def _first(train: Loader, validator: Validator) -> int:
    """The epoch to go on with: one that is trained, if the save was made before it was validated."""
    epoch, done = train.upcoming.epoch, validator.submitted
    behind = done is not None and train.cursor.step > max(done, 0) and train.upcoming.batch == 0
    return epoch - 1 if behind else epoch


def _epochs(loop: _Loop, epochs: int, reports: _Reports) -> None:
    """Train until `epochs` are complete, and report them."""
    validator = loop.validator
    try:
        for epoch in range(_first(loop.train, validator), epochs):
            reports.tell(_epoch(loop, epoch, reports))
    except SystemExit:
        # A signal asked the run to end, and it is saved: who goes on may be told again, or never.
        validator.between = None
        reports.tell(validator.finish())
        raise
    reports.tell(validator.finish())


def _epoch(loop: _Loop, epoch: int, reports: _Reports) -> list[Result]:
    """Train what is left of an epoch, and submit it to validation; results of validations that are due."""
    begun, before = time.perf_counter(), by_phase(loop.recorder)
    losses = _Losses()
    if loop.train.upcoming.epoch == epoch:
        _train(loop, losses)
    trained = time.perf_counter()
    step, rate = loop.train.cursor.step, loop.optimizer.param_groups[0]["lr"]
    _check_finite(epoch + 1, losses.mean())

    def report() -> EpochReport:
        after = by_phase(loop.recorder)
        return EpochReport(
            epoch=epoch + 1,
            step=step,
            images=losses.samples,
            learning_rate=rate,
            loss=losses.mean(),
            test_loss=math.nan,
            accuracy=None,
            images_per_s=losses.samples / (trained - begun),
            epoch_s=time.perf_counter() - begun,
            phases_s={k: s - before.get(k, 0.0) for k, s in after.items()},
        )

    reports.add(report())
    due = loop.validator.submit(epoch + 1, step)
    reports.add(report())  # with the time of what came before it in the queue
    return due


class _Reports:
    """Reports of epochs, told when their validation is."""

    def __init__(self, task: Task, shown: Progress, run: RunDirectory | None) -> None:
        self.told: list[EpochReport] = []
        self._task, self._shown, self._run = task, shown, run
        self._waiting: dict[int, EpochReport] = {}

    def add(self, report: EpochReport) -> None:
        """An epoch that is trained; called again, its times are replaced."""
        self._waiting[report.epoch] = report

    def tell(self, results: list[Result]) -> None:
        """Epochs that are validated."""
        for result in results:
            self._tell(result)

    def _tell(self, result: Result) -> None:
        found, metric = result.figures, self._task.metric
        report = self._waiting.pop(result.epoch, None) or _untrained(result)
        report = replace(report, test_loss=found["test_loss"], **{metric: found[metric]})
        _check_finite(report.epoch, report.loss, report.test_loss)
        self.told.append(report)
        self._shown.epoch(report)
        if self._run is not None:
            self._run.log(report.figures())
        _note(report)


def _untrained(result: Result) -> EpochReport:
    """Of an epoch that was trained by a process before this one."""
    return EpochReport(
        epoch=result.epoch,
        step=result.step,
        images=0,
        learning_rate=None,
        loss=None,
        test_loss=math.nan,
        accuracy=None,
        images_per_s=0.0,
        epoch_s=0.0,
        phases_s={},
    )


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
            assert mean is not None, "a step was made"
            loop.shown.step(loop.train.cursor, mean, rate)
            if (trace := active()) is not None:
                trace.note("loss", step=loop.train.cursor.step, value=mean)


def _note(report: EpochReport) -> None:
    """Tell the trace what the epoch gave."""
    trace = active()
    if trace is None:
        return
    figures = report.figures()
    if report.loss is not None:
        trace.note("loss", step=report.step, value=report.loss)
    for name in ("test_loss", "accuracy", "psnr_db", "images_per_s"):
        if figures.get(name) is not None:
            trace.note("metric", step=report.step, name=name, value=figures[name])


def _check_finite(epoch: int, loss: float | None, test_loss: float = 0.0) -> None:
    trained = 0.0 if loss is None else loss
    if not math.isfinite(trained + test_loss):
        raise FivefoldError(
            f"training diverged: in epoch {epoch} the mean loss was {trained:.3g}"
            + (f", on the test data {test_loss:.3g}" if test_loss else "")
            + "; a smaller train.learning_rate or a longer train.warmup_epochs usually helps"
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

    def mean(self) -> float | None:
        """None where there were no samples."""
        self._sum += sum(float(loss) * samples for loss, samples in self._unread)
        self._unread.clear()
        return self._sum / self.samples if self.samples else None
