"""`progress`: how far a loop of one's own is, told by the first rank on standard error.

for step, (x, y) in ff.progress(ckpt.resume(data, epochs=5), mesh):      a bar on a terminal:
    ...                                                                  step 120/900 ━━━━━━╸      4.1 steps/s
                                                                         elsewhere a line every few seconds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from operator import length_hint
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import TaskID

from fivefold.launch.environment import locate
from fivefold.mesh import Mesh
from fivefold.trace import StepFigures
from fivefold.train.logger import LogWriter
from fivefold.train.progress import BAR_S, LINE_S, bar_of, draws

__all__ = ["Shown", "progress"]

_T = TypeVar("_T")


def progress(
    items: Iterable[_T], mesh: Mesh, *, total: int | None = None, console: Console | None = None
) -> Shown[_T]:
    """Iterate over `items`, and show how far that is: a bar on a terminal, plain lines elsewhere.

    The first rank of the mesh shows it, on standard error; the others only iterate.

    Args:
        items: a loader, what `Checkpointer.resume` returned, or anything that can be iterated over.
        mesh: what `fivefold.start` returned.
        total: how many there will be; default: what `items` says, a length or what is left of a run.
        console: where to show it instead.

    What is returned can be given to a `Logger` as a writer: then it shows loss and samples per second too.
    """
    return Shown(items, mesh, total, console)


class Shown(LogWriter, Generic[_T]):
    """What `progress` returns: iterable, and a writer of a `Logger`, whose last figures come after it."""

    def __init__(
        self, items: Iterable[_T], mesh: Mesh, total: int | None, console: Console | None
    ) -> None:
        self._items, self._total = items, total
        self._shows = mesh.rank == 0 and mesh.role == "trainer"
        self._console = console
        self._figures = ""
        self._logged = False
        self._unsaid: _Bar | _Lines | None = None
        """what ended without its last line, whose figures are still to come"""

    def open(self) -> None:
        """A logger has begun."""
        self._logged = True

    def __call__(self, figures: StepFigures) -> None:
        """Show figures from now on."""
        parts: list[str] = []
        if figures.loss is not None:
            parts.append(f"loss {figures.loss:.4g}")
        if figures.samples_per_s is not None:
            parts.append(f"{figures.samples_per_s:,.0f} samples/s")
        self._figures = "  ".join(parts)

    def close(self, *, failed: bool = False) -> None:
        """The logger has ended: no more figures come."""
        del failed  # what a loop has come to is said all the same
        self._logged = False
        self._say_last()

    def _say_last(self) -> None:
        display, self._unsaid = self._unsaid, None
        if display is not None:
            display.end(self._figures)

    def __iter__(self) -> Iterator[_T]:
        """The items."""
        if not self._shows:
            yield from self._items
            return
        self._say_last()
        console = self._console or Console(stderr=True)
        items = iter(self._items)
        with ExitStack() as held:
            display: _Bar | _Lines | None = None
            for count, item in enumerate(items, start=1):
                # A run that goes on knows where it is once its state is loaded: with the first item.
                step = getattr(items, "step", count)
                if display is None:
                    display = self._display(items, console, step - 1, held)
                yield item
                display.at(step, self._figures)
            self._unsaid = display
        if not self._logged:
            self._say_last()

    def _display(
        self, items: Iterator[_T], console: Console, done: int, held: ExitStack
    ) -> _Bar | _Lines:
        total = self._total or getattr(items, "total", None) or length_hint(self._items) or None
        if not draws(console, locate().launcher):
            return _Lines(console, done, total)
        bar = _Bar(console, done, total)
        held.callback(bar.close)
        return bar


class _Lines:
    """One line every few seconds, and one at the end."""

    def __init__(self, console: Console, done: int, total: int | None) -> None:
        self._console, self._total = console, total
        self._first = self._step = self._said = done
        self._begun_s = time.monotonic()
        self._next_s = self._begun_s + LINE_S
        self._figures = ""

    def at(self, step: int, figures: str) -> None:
        """Step `step` is done."""
        self._step, self._figures = step, figures
        if time.monotonic() >= self._next_s:
            self._say()

    def end(self, figures: str) -> None:
        """No more comes."""
        if self._said != self._step or figures != self._figures:
            self._figures = figures
            self._say()

    def _say(self) -> None:
        now = time.monotonic()
        self._said, self._next_s = self._step, now + LINE_S
        rate = (self._step - self._first) / max(now - self._begun_s, 1e-9)
        line = f"{_where(self._step, self._total)}  {self._figures or f'{rate:.3g} steps/s'}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """A bar, which disappears at the end but for a line that stays."""

    def __init__(self, console: Console, done: int, total: int | None) -> None:
        self._lines = _Lines(console, done, total)
        self._total = total
        self._next_s = 0.0
        # What the script prints appears above the bar; what does not go to the terminal is left alone.
        self._bar = bar_of(
            console, redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty()
        )
        self._task: TaskID = self._bar.add_task(
            _where(done, total), total=total, completed=done, figures=""
        )
        self._bar.start()

    def at(self, step: int, figures: str) -> None:
        """Step `step` is done."""
        self._step, self._figures = step, figures
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + BAR_S
            self._bar.update(
                self._task, completed=step, description=_where(step, self._total), figures=figures
            )

    def end(self, figures: str) -> None:
        """No more comes."""
        self._lines.at(self._step, figures)
        self._lines.end(figures)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _where(step: int, total: int | None) -> str:
    return f"step {step}" if total is None else f"step {step}/{total}"
