"""Figures for Weights & Biases, by its own package."""

from __future__ import annotations

from typing import Any, cast

from fivefold.integrations import needs
from fivefold.trace import StepFigures
from fivefold.train.logger import LogWriter

__all__ = ["Wandb"]


class Wandb(LogWriter):
    """A run of W&B with a chart for each scalar, over `step`.

    `options` are those of `wandb.init`: project, name, config, mode, ..., and id with resume for a run that
    goes on. On nodes without internet, mode="offline" writes to the folder `wandb`, for `wandb sync` later.
    Raises `UsageError` without the package wandb (extra `wandb`).
    """

    def __init__(self, **options: Any) -> None:
        needs("wandb")
        self._options = options
        self._run: Any = None

    def open(self) -> None:
        """`wandb.init`, whose errors are raised."""
        import wandb as package  # pyright: ignore[reportMissingImports]

        self._run = cast(Any, package).init(**self._options)
        # W&B's own counter only grows; a run that goes on from a save may be behind it.
        self._run.define_metric("*", step_metric="step")

    def __call__(self, figures: StepFigures) -> None:
        """A value for each scalar that is known."""
        self._run.log({"step": figures.step, **figures.scalars()})

    def close(self, *, failed: bool = False) -> None:
        """End the run, as failed if it is."""
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)
