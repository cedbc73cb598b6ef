"""Validation of a task over the whole mesh, now; `fivefold.Validator` does it beside training."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.data import Loader
from fivefold.mesh import Mesh
from fivefold.offload.evaluation import Evaluator
from fivefold.offload.slices import added
from fivefold.offload.validator import Validator
from fivefold.parallel import ParallelModel
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.plan import Numerics
from fivefold.train.task import CLASSES, Task

__all__ = ["validate", "validator"]


def validate(
    model: ParallelModel,
    test: Loader,
    mesh: Mesh,  # noqa: ARG001 - that of the model
    arithmetic: Arithmetic,
    task: Task = CLASSES,
    *,
    between: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Mean loss and metric of a task, of a classifier by default, over one epoch of `test`. Collective.

    `between` is called after every batch.
    """
    sums = Evaluator(model, test, task.sums).together(test, arithmetic, between)
    figures = task.figures(added(list(sums)))
    return figures["test_loss"], figures[task.metric]


def validator(
    model: ParallelModel, test: Loader, task: Task, numerics: Numerics, delay: int | None = None
) -> Validator:
    """A validator of a task; `delay` None: results come with the next one where helpers evaluate."""
    return Validator(
        model, test, score=task.sums, figures=task.figures, delay=delay, numerics=numerics
    )
