"""Telling how far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from fivefold.closing import Closing
from fivefold.data import Cursor
from fivefold.train.summary import EpochReport, scored

__all__ = ["Bar", "Progress", "ProgressLines", "Silent", "bar_of", "draws", "suited"]

BAR_S = 0.25
LINE_S = 5.0


class Progress(Protocol):
    """Hears of the beginning, of steps when it is due, and of every epoch; a context around the loop."""

    def begin(self, step: int, steps: int, epochs: int) -> None:
        """Training starts after `step` of `steps` in `epochs`."""
        ...

    def due(self) -> bool:
        """Whether a step is worth reading the loss for."""
        ...

    def step(self, cursor: Cursor, loss: float, images_per_s: float) -> None:
        """A step was made. `loss` is the mean of the epoch so far."""
        ...

    def epoch(self, report: EpochReport) -> None:
        """An epoch is over."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None: ...


class Silent(Closing):
    """Tells nothing: for ranks other than the first."""

    def begin(self, step: int, steps: int, epochs: int) -> None:
        """Nothing."""

    def due(self) -> bool:
        """Never."""
        return False

    def step(self, cursor: Cursor, loss: float, images_per_s: float) -> None:
        """Nothing."""

    def epoch(self, report: EpochReport) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Timed(Silent):
    """What both displays share: the clock, the number of epochs, and the line of an epoch."""

    every_s: float

    def __init__(self, console: Console) -> None:
        self.console = console
        self.epochs = 0
        self._next_s = 0.0

    def begin(self, step: int, steps: int, epochs: int) -> None:  # noqa: ARG002
        """Remember how many epochs there are."""
        self.epochs = epochs
        self._next_s = time.monotonic() + self.every_s

    def due(self) -> bool:
        """Whether `every_s` seconds passed since a line or an update."""
        return time.monotonic() >= self._next_s

    def epoch(self, report: EpochReport) -> None:
        """One line, which stays."""
        r, width = report, len(str(self.epochs))
        loss = "trained before" if r.loss is None else f"loss {r.loss:.3f}"
        speed = f"  {r.images_per_s:,.0f} images/s" if r.images else ""
        self.say(f"epoch {r.epoch:{width}}/{self.epochs}  {loss}  {' '.join(scored(r))}{speed}")

    def say(self, line: str) -> None:
        """Write a line as it is: no markup, no wrapping."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._next_s = time.monotonic() + self.every_s


class ProgressLines(_Timed):
    """One line per epoch, and one every few seconds between."""

    every_s = LINE_S

    def step(self, cursor: Cursor, loss: float, images_per_s: float) -> None:
        """One line."""
        width = len(str(self.epochs))
        self.say(
            f"epoch {cursor.epoch + 1:{width}}/{self.epochs}  step {cursor.step}  loss {loss:.3f}  "
            f"{images_per_s:,.0f} images/s"
        )


class Bar(_Timed):
    """A bar with epoch, images/s, loss and time left; the line of every epoch scrolls by above it."""

    every_s = BAR_S

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = bar_of(console)
        self._task: TaskID | None = None

    def begin(self, step: int, steps: int, epochs: int) -> None:
        """Draw the bar."""
        super().begin(step, steps, epochs)
        self._task = self._bar.add_task(
            f"epoch 1/{epochs}", total=steps, completed=step, figures=""
        )

    def step(self, cursor: Cursor, loss: float, images_per_s: float) -> None:
        """Move the bar."""
        assert self._task is not None
        self._bar.update(
            self._task,
            completed=cursor.step,
            description=f"epoch {cursor.epoch + 1}/{self.epochs}",
            figures=f"{images_per_s:,.0f} images/s  loss {loss:.3f}",
        )
        self._next_s = time.monotonic() + self.every_s

    def epoch(self, report: EpochReport) -> None:
        """One line above the bar, which does not go back for an epoch that is validated beside training."""
        assert self._task is not None
        super().epoch(report)
        reached = max(report.step, int(self._bar.tasks[0].completed))
        self._bar.update(self._task, completed=reached)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def bar_of(
    console: Console, *, redirect_stdout: bool = False, redirect_stderr: bool = False
) -> RichProgress:
    """A bar between a description and figures, with the time that is left; it disappears at the end."""
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        expand=True,
        transient=True,
        refresh_per_second=1 / BAR_S,
        redirect_stdout=redirect_stdout,
        redirect_stderr=redirect_stderr,
    )


def draws(console: Console, launcher: str) -> bool:
    """Whether a bar can be drawn: on a terminal, unless `launcher` (of a `RankPlace`) passes the output on.

    Open MPI gives its ranks a terminal of their own, whatever is at the end of the pipe.
    """
    return launcher in ("alone", "torchrun") and console.is_terminal


def suited(console: Console, launcher: str = "alone") -> Progress:
    """A bar if one can be drawn, else lines."""
    return Bar(console) if draws(console, launcher) else ProgressLines(console)
