"""What is decided by validations: which weights to keep, when to stop, when to lower the learning rate.

All of them go by the tags of a result, (epoch, step), never by when it came, and results are equal on all
ranks. So every rank decides alike, and a run with helpers decides what a run without them decides, if both
state the same `delay`:

    delay 0    the result of epoch e is known before epoch e + 1 begins
    delay 1    ... before epoch e + 2 begins: one more epoch was trained meanwhile
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

from torch.optim.lr_scheduler import ReduceLROnPlateau

from fivefold.errors import UsageError, suggest
from fivefold.offload.results import Result

__all__ = ["BestSoFar", "EarlyStopping", "Plateau"]

Better = Literal["min", "max"]


class _Watched:
    """A figure of results, and which of two is better."""

    def __init__(self, figure: str, better: Better, least: float = 0.0) -> None:
        if better not in ("min", "max"):
            raise UsageError(f"better is {better!r}{suggest(str(better), ('min', 'max'))}")
        self.figure, self.better, self.least = figure, better, least
        self.value = math.inf if better == "min" else -math.inf
        """the best so far"""

    def of(self, result: Result) -> float:
        """Raises `UsageError` if the result has no such figure."""
        if self.figure not in result.figures:
            raise UsageError(
                f"results have no figure {self.figure!r}{suggest(self.figure, result.figures)}"
            )
        return float(result.figures[self.figure])

    def improves(self, value: float) -> bool:
        """Whether a value is better than the best by more than `least`; NaN never is."""
        gain = self.value - value if self.better == "min" else value - self.value
        return gain > self.least


class BestSoFar:
    """Keeps the weights of the best validation, of the step that it was made at.

    With a delay the model has been trained further by the time a result is known; what is kept is the
    snapshot that was evaluated, so no checkpoint of that step is needed. One copy of the weights is held.
    Give it to a `Checkpointer` by name, so that a resumed run knows the best of all: saves hold the copy.

    Args:
        figure: of `Result.figures`.
        better: whether a smaller or a larger value is better; of equals the first one is kept.
    """

    def __init__(self, figure: str, better: Better = "max") -> None:
        self._watched = _Watched(figure, better)
        self.result: Result | None = None
        """the best validation so far; its `state_dict()` gives the weights"""

    def update(self, result: Result) -> bool:
        """Take note of a result; whether it is the best so far. Raises `UsageError` without the figure.

        Collective where the layout divides the net.
        """
        value = self._watched.of(result)
        better = not math.isnan(value) and (self.result is None or self._watched.improves(value))
        if better:
            self._watched.value, self.result = value, result.kept()
        return better

    def state_dict(self) -> dict[str, Any]:
        """The best so far and its weights. Collective where the layout divides the net."""
        best = self.result
        if best is None:
            return {"best": None}
        told = {"epoch": best.epoch, "step": best.step, "by_helpers": best.by_helpers}
        figures = {"figures": dict(best.figures), "sums": best.sums}
        return {"best": {**told, **figures, "weights": best.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        best = state_dict["best"]
        self.result = None if best is None else Result.known(**best)
        if self.result is not None:
            self._watched.value = self._watched.of(self.result)


class EarlyStopping:
    """Tells when to stop: when a figure has not improved in `patience` validations in a row.

    With a delay d, training has gone on for d more validations by then: it stops that much later, at the same
    moment in every run with this delay. Give it to a `Checkpointer` by name, so that a resumed run goes on
    counting.

    Args:
        figure: of `Result.figures`.
        patience: validations in a row that do not improve it, at least 1.
        better: whether a smaller or a larger value is better.
        least: by how much it has to be better to count, at least.
    """

    def __init__(
        self, figure: str, patience: int, better: Better = "max", *, least: float = 0.0
    ) -> None:
        if patience < 1 or not least >= 0:
            raise UsageError(
                f"patience is {patience} and least is {least}: they have to be at least 1 and 0"
            )
        self._watched = _Watched(figure, better, least)
        self.patience = patience
        self.waited = 0
        """validations in a row without improvement"""

    def update(self, result: Result) -> bool:
        """Take note of a result; whether to stop. Raises `UsageError` without the figure."""
        value = self._watched.of(result)
        if self._watched.improves(value):
            self._watched.value, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {"best": self._watched.value, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._watched.value = float(state_dict["best"])
        self.waited = int(state_dict["waited"])


class Plateau:
    """Feeds torch's `ReduceLROnPlateau` with a figure.

    With a delay d, the learning rate is lowered d validations later than without, at the same moment in every
    run with this delay. Checkpoint the scheduler itself.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, figure: str) -> None:
        self.scheduler = scheduler
        self._watched = _Watched(figure, cast(Better, scheduler.mode))

    def update(self, result: Result) -> bool:
        """Take note of a result; whether a learning rate was lowered.

        Raises `UsageError` without the figure.
        """
        before = [group["lr"] for group in self.scheduler.optimizer.param_groups]
        self.scheduler.step(self._watched.of(result))
        return before != [group["lr"] for group in self.scheduler.optimizer.param_groups]
