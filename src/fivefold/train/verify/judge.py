"""What rank 0 alone does in a verification: run the reference, and judge the layout by it.

In float32 a rounding may decide on which side of zero the input of a ReLU falls. Then the gradients jump by
a percent, in one process as well as in any layout, and one run of one process may happen not to show it.
So where the layout exceeds its tolerance, one process gets more chances: runs whose inputs differ by one
ulp, until its own error explains the layout's or `CHANCES` runs have not. A wrong layout finds no such run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.train.verify.measure import QUANTITIES, Snapshot, errors, not_finite
from fivefold.train.verify.reference import OneProcess, State
from fivefold.train.verify.report import Item, Quantity, Replicas, Report, tolerance

__all__ = ["CHANCES", "Judge", "nudged"]

CHANCES = 12

UNCONTROLLED = (
    "the model draws random numbers that do not follow the global sample; the warning '... draws random "
    "numbers in the model ...' names the function. Draw them with nn.Dropout and its kin, or with "
    "bernoulli_ on a tensor whose leading dim is the samples"
)
DRAWS = (
    "the model draws random numbers. Masks follow the samples where these are on the leading dim of what is "
    "dropped, alone or together with other dims; in (time, samples, ...) they do not"
)
NOT_SAMPLES = "not compared, because the leading dim is not the samples of the batch: "

_Errors = dict[str, dict[str, float]]


class Judge:
    """Runs the reference from a state, then says how far the layout's step from the same state was off."""

    def __init__(
        self, net: nn.Module, mesh: Mesh, loss: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        self._seed, self._model = mesh.plan.numerics.seed, type(net).__name__
        self._wide, self._layout = dtype == torch.float64, str(mesh.layout)
        self._dtype = "float64" if self._wide else "float32"
        self._truth = OneProcess(net, loss, torch.float64, self._seed)
        self._alone = self._truth if self._wide else OneProcess(net, loss, dtype, self._seed)
        self._items: dict[str, list[Item]] = {quantity: [] for quantity in QUANTITIES}
        self._notes: dict[str, None] = {}

    def divide(self, micro_batches: Callable[[int], list[Tensor]] | None, schedule: str) -> None:
        """Let the reference accumulate over the micro-batches of the layout's schedule."""
        self._truth.micro_batches = self._alone.micro_batches = micro_batches
        self._layout += schedule

    def reference(self, state: State, inputs: Any, targets: Any, step: int) -> dict[str, Any]:
        """Train the reference for one step; returns what all ranks have to know of it."""
        self._step, self._again = step, (state, inputs, targets, step)
        try:
            own = self._run_alone(0 if self._wide else None)
            self._expected = self._truth.step(*self._again)
        except Exception as problem:  # noqa: BLE001 - the user's code may raise anything
            return {"problem": _cannot_run(problem, inputs, targets), "uncontrolled": False}
        self._next = State.of(self._truth.net, self._truth.optimizer, dtype=self._alone.dtype)
        self._own = errors(own, self._expected)
        self._tell_not_finite("the reference itself", self._expected)
        return {"problem": "", "uncontrolled": self._truth.uncontrolled}

    def compare(self, got: Snapshot) -> State:
        """Judge the layout's step; returns where the next step starts."""
        expected, own = self._expected, self._own
        if missing := [name for name in expected.outputs if name not in got.outputs]:
            kept = {n: value for n, value in expected.outputs.items() if n not in missing}
            expected = dataclasses.replace(expected, outputs=kept)
            self._notes[NOT_SAMPLES + ", ".join(missing)] = None
        self._tell_not_finite("the layout", got)
        found = errors(got, expected)
        items = self._judged(found, own)
        for chance in range(0 if self._wide else CHANCES):
            if all(item.excess <= 1 for quantity in items.values() for item in quantity):
                break
            own = _larger(own, errors(self._run_alone(chance), self._expected))
            items = self._judged(found, own)
        for quantity, more in items.items():
            self._items[quantity] += more
        return self._next

    def report(self, steps: int, samples: int, replicas: Replicas) -> Report:
        """The verdict over all steps."""
        report = Report(
            model=self._model,
            layout=self._layout,
            dtype=self._dtype,
            samples=samples,
            steps=steps,
            seed=self._seed,
            quantities=tuple(Quantity.of(name, items) for name, items in self._items.items()),
            replicas=replicas,
            notes=tuple(self._notes),
        )
        if self._truth.draws and not report.passed:
            hint = UNCONTROLLED if self._truth.uncontrolled else DRAWS
            report = dataclasses.replace(report, notes=(hint, *report.notes))
        return report

    def _run_alone(self, chance: int | None) -> Snapshot:
        state, inputs, targets, step = self._again
        if chance is not None:
            inputs = nudged(inputs, self._seed + step * CHANCES + chance)
        return self._alone.step(state, inputs, targets, step)

    def _judged(self, found: _Errors, own: _Errors) -> dict[str, list[Item]]:
        items: dict[str, list[Item]] = {}
        for quantity, by_name in found.items():
            known = {name: own[quantity].get(name, 0.0) for name in by_name}
            if not self._wide:
                known = dict.fromkeys(known, max(known.values(), default=0.0))
            items[quantity] = [
                Item(
                    quantity,
                    name,
                    self._step,
                    error,
                    known[name],
                    tolerance(known[name], self._dtype),
                )
                for name, error in by_name.items()
            ]
        return items

    def _tell_not_finite(self, who: str, values: Snapshot) -> None:
        found = list(not_finite(values))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            self._notes[f"{who} gives NaN or infinity: {', '.join(found[:3])}{more}"] = None


def nudged(tree: Any, seed: int) -> Any:
    """The same tree, each floating-point number moved to a neighbouring one, up or down at random."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        up = torch.rand(leaf.shape, generator=generator, dtype=torch.float32) < 0.5
        return torch.nextafter(leaf, torch.where(up, math.inf, -math.inf).to(leaf))

    return map_tensors(nudge, tree)


def _larger(one: _Errors, other: _Errors) -> _Errors:
    return {
        quantity: {name: max(error, other[quantity][name]) for name, error in by_name.items()}
        for quantity, by_name in one.items()
    }


def _cannot_run(problem: Exception, inputs: Any, targets: Any) -> str:
    def shapes(tree: Any) -> str:
        return ", ".join(f"{tuple(leaf.shape)}" for leaf in leaves(tree)) or "none"

    said = str(problem).strip().splitlines() or ["no reason given"]
    return (
        f"one process alone cannot train the model on inputs of shape {shapes(inputs)} with targets of "
        f"shape {shapes(targets)}: {type(problem).__name__}: {said[0]}"
    )
