"""Figures for TensorBoard, by the writer that comes with torch."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.integrations import needs
from fivefold.trace import StepFigures
from fivefold.train.logger import LogWriter

__all__ = ["TensorBoard"]

_FLUSH_S = 10


class TensorBoard(LogWriter):
    """Scalars in event files below `folder`. See them with `tensorboard --logdir FOLDER`.

    A run that goes on from a save writes to the same folder; what an earlier start wrote there of steps that
    are made again is hidden.
    Raises `UsageError` without the package tensorboard (extra `tensorboard`).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        needs("tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self) -> None:
        """Make the folder, and import what takes a moment. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.W_OK):
            raise PermissionError(f"{self._folder} cannot be written to")
        _summary_writer()

    def __call__(self, figures: StepFigures) -> None:
        """A value for each scalar that is known."""
        if self._writer is None:
            first = figures.step - figures.steps + 1
            self._writer = _summary_writer()(
                str(self._folder), purge_step=first if first > 1 else None, flush_secs=_FLUSH_S
            )
        # One event for all: `add_scalar` makes one of each, and took half of the time of a record.
        summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [summary.Value(tag=n, simple_value=v) for n, v in figures.scalars().items()]
        self._writer.file_writer.add_summary(summary(value=values), figures.step)

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        """Write out what is kept back."""
        if self._writer is not None:
            self._writer.close()


def _summary_writer() -> Any:
    return import_module("torch.utils.tensorboard").SummaryWriter
