"""What a verification found: figures, and whether they are within tolerance. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KEPT", "Item", "Quantity", "Replicas", "Report", "tolerances"]

FLOAT64_FLOOR, FLOAT64_CAP, FLOAT64_FACTOR = 1e-10, 1e-7, 100.0
FLOAT32_FACTOR = 2.0
FLOAT32_FLOOR = 4 * 2.0**-23
"""four roundings of the result itself: a loss of one process may be right to the last bit by luck"""
KEPT = 5
"""how many of the worst tensors of a quantity are kept"""


@dataclass(frozen=True)
class Item:
    """One tensor in one step."""

    name: str
    step: int
    error: float
    """of the layout"""
    own: float
    """of one process: in float64 its reaction to a change of its input by one ulp, in float32 its error"""
    tolerance: float

    @property
    def excess(self) -> float:
        """Error over tolerance: above 1 is too much."""
        return self.error / self.tolerance


@dataclass(frozen=True)
class Quantity:
    """The loss, the outputs, the gradients, the buffers or the weights, over all steps."""

    name: str
    own: float
    """the largest `Item.own`, of whichever tensor"""
    worst: tuple[Item, ...]
    """largest excess first, `KEPT` at most; empty if the model has no such tensors"""

    @classmethod
    def of(cls, name: str, items: Sequence[Item]) -> Quantity:
        """Keep the worst of many."""
        own = max((item.own for item in items), default=0.0)
        return cls(name, own, tuple(sorted(items, key=lambda item: -item.excess)[:KEPT]))

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
    def worst(self) -> tuple[Item, ...]:
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
        told |= {"passed": self.passed, "verdict": self.verdict()}
        return _without_infinity(told)


def tolerances(own: Mapping[str, float], dtype: str) -> dict[str, float]:
    """What every tensor of a quantity may be wrong by in one step, from the errors of one process.

    float64: every tensor is judged by its own reaction, which a factor of 100 makes robust:

        tolerance = max(1e-10, 100 x the reaction of that tensor to one ulp), never above 1e-7

    float32: a factor of 2 says nothing about a single tensor, whose rounding error is small or large by
    luck. The largest error of the layout is compared with the largest of one process, over all tensors:

        tolerance = max(4 roundings of float32, 2 x the largest error of one float32 process)
    """
    if dtype == "float64":
        return {
            name: min(FLOAT64_CAP, max(FLOAT64_FLOOR, FLOAT64_FACTOR * error))
            for name, error in own.items()
        }
    largest = max(own.values(), default=0.0)
    joint = max(FLOAT32_FLOOR, FLOAT32_FACTOR * largest if math.isfinite(largest) else 0.0)
    return dict.fromkeys(own, joint)


def _brief(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _without_infinity(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_infinity(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_infinity(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
