"""What a verification found: figures, and whether they are within tolerance. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KEPT", "Quantity", "Replicas", "Report", "TensorReport", "tolerance"]

FLOAT64_FLOOR, FLOAT64_CAP, FLOAT64_FACTOR = 1e-10, 1e-7, 100.0
FLOAT32_FACTOR = 2.0
FLOAT32_FLOOR = 4 * 2.0**-23
"""four roundings of the result itself: a loss of one process may be right to the last bit by luck"""
KEPT = 5
"""how many of the worst tensors of a quantity are kept"""


@dataclass(frozen=True)
class TensorReport:
    """One tensor in one step."""

    quantity: str
    name: str
    step: int
    error: float
    """of the layout"""
    own: float
    """what the tolerance derives from: in float64 this tensor's reaction, in one process, to a change of the
    input by one ulp; in float32 the largest error of one process, over all tensors of the quantity
    """
    tolerance: float

    @property
    def excess(self) -> float:
        """Error over tolerance: above 1 is too much."""
        return self.error / self.tolerance


@dataclass(frozen=True)
class Quantity:
    """The loss, the outputs, the gradients, the buffers or the weights, over all steps."""

    name: str
    worst: tuple[TensorReport, ...]
    """largest excess first, each tensor in its worst step, `KEPT` at most; empty if there are none such"""

    @classmethod
    def of(cls, name: str, items: Sequence[TensorReport]) -> Quantity:
        """Keep the worst of many."""
        worst: dict[str, TensorReport] = {}
        for item in sorted(items, key=lambda item: -item.excess):
            worst.setdefault(item.name, item)
        return cls(name, tuple(worst.values())[:KEPT])

    @property
    def passed(self) -> bool:
        """Whether every tensor was within its tolerance in every step."""
        return not self.worst or self.worst[0].error <= self.worst[0].tolerance


@dataclass(frozen=True)
class Replicas:
    """Whether all ranks hold the same gradients, buffers and weights, to the last bit."""

    difference: float = 0.0
    """the largest absolute difference from rank 0"""
    where: str = ""
    """rank and tensor of that difference"""


@dataclass(frozen=True)
class Report:
    """The result of `fivefold.train.verify.verify`, the same on every rank."""

    model: str
    layout: str
    dtype: str
    samples: int
    """of the global batch of the first step"""
    steps: int
    seed: int
    quantities: tuple[Quantity, ...]
    replicas: Replicas
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the layout is exact."""
        return self.replicas.difference == 0 and all(q.passed for q in self.quantities)

    @property
    def worst(self) -> tuple[TensorReport, ...]:
        """The worst tensors of all quantities, largest excess first."""
        every = [item for quantity in self.quantities for item in quantity.worst]
        return tuple(sorted(every, key=lambda item: -item.excess)[:KEPT])

    def verdict(self) -> str:
        """One line: exact or not, and the figure that decides."""
        if self.passed or any(not q.passed for q in self.quantities):
            first = self.worst[0]
            figure = f"largest error {_brief(first.error)} in {first.name}"
            figure += f", tolerance {_brief(first.tolerance)}"
        else:
            figure = f"replicas differ by {_brief(self.replicas.difference)}: {self.replicas.where}"
        if self.passed:
            return f"exact: {self.model} under {self.layout} equals one process ({figure})"
        return f"NOT exact: {self.model} under {self.layout} differs from one process ({figure})"

    def figures(self) -> dict[str, Any]:
        """Everything as plain data for JSON, infinity and NaN as null."""
        told: dict[str, Any] = asdict(self)
        for shown, quantity in zip(told["quantities"], self.quantities, strict=True):
            shown["passed"] = quantity.passed
        return _without_infinity({"passed": self.passed, "verdict": self.verdict(), **told})


def tolerance(own: float, dtype: str) -> float:
    """What a tensor may be wrong by in one step, where `own` is the error of one process.

    float64: every tensor is judged by its own reaction, which a factor of 100 makes robust:

        tolerance = max(1e-10, 100 x the reaction of that tensor to one ulp), never above 1e-7

    float32: a factor of 2 says nothing about a single tensor, whose rounding error is small or large by
    luck. The largest error of the layout is compared with the largest of one process, over all tensors:

        tolerance = max(4 roundings of float32, 2 x the largest error of one float32 process)
    """
    if dtype == "float64":
        return min(FLOAT64_CAP, max(FLOAT64_FLOOR, FLOAT64_FACTOR * own))
    return max(FLOAT32_FLOOR, FLOAT32_FACTOR * own if math.isfinite(own) else 0.0)


def _brief(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _without_infinity(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_infinity(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_infinity(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
