"""What rank 0 alone does in a verification: run the reference, and judge the layout by it.

In float32 a rounding may decide on which side of zero the input of a ReLU falls. Then the gradients jump by
a percent, in one process as well as in any layout, and one run of one process may happen not to show it.
So where the layout exceeds its tolerance, one process gets more chances: runs whose inputs differ by one
ulp, until its own error explains the layout's or `CHANCES` runs have not. A wrong layout finds no such run.
"""

from __future__ import annotations

import dataclasses

import torch

from fivefold.mesh import Mesh
from fivefold.train.verify.measure import QUANTITIES, StepResult, errors, not_finite
from fivefold.train.verify.reference import Reference, ReferenceStep
from fivefold.train.verify.report import Quantity, Replicas, Report, TensorReport, tolerance

__all__ = ["CHANCES", "Judge"]

CHANCES = 12

UNCONTROLLED = (
    "the model draws random numbers that do not follow the global sample; the warning '... draws random "
    "numbers in the model ...' names the function. Draw them with nn.Dropout and its kin, with "
    "torch.rand, or with bernoulli_, where the leading dim is the samples"
)
DRAWS = (
    "the model draws random numbers. Masks follow the samples where these are on the leading dim of what is "
    "dropped, alone or together with other dims; in (time, samples, ...) they do not"
)
NOT_SAMPLES = "not compared, because the leading dim is not the samples of the batch: "

_Errors = dict[str, dict[str, float]]


class Judge:
    """Runs the reference, then says how far the layout's steps from the same states were off."""

    def __init__(
        self, reference: Reference, mesh: Mesh, dtype: torch.dtype, described: str
    ) -> None:
        """Raises `CannotRun`."""
        self._seed, self._layout = mesh.plan.numerics.seed, described
        self._reference, self._dtype = reference, dtype
        self._wide = dtype == torch.float64
        self.truth = reference.train(torch.float64, rounded=None if self._wide else dtype)
        # The reaction to a change of the input; in float32 that of a change of the precision comes first.
        self._alone = [self._run_alone(0 if self._wide else None)]
        self._items: dict[str, list[TensorReport]] = {quantity: [] for quantity in QUANTITIES}
        self._notes: dict[str, None] = {}

    def compare(self, got: StepResult, step: int) -> None:
        """Judge the layout's step."""
        truth = expected = self.truth[step].snapshot
        self._tell_not_finite("the reference itself", truth)
        if missing := [name for name in expected.outputs if name not in got.outputs]:
            kept = {n: value for n, value in expected.outputs.items() if n not in missing}
            expected = dataclasses.replace(expected, outputs=kept)
            self._notes[NOT_SAMPLES + ", ".join(missing)] = None
        self._tell_not_finite("the layout", got)
        found, own = errors(got, expected), errors(self._alone[0][step].snapshot, truth)
        items = self._judged(found, own, step)
        for chance in range(1, 1 if self._wide else CHANCES + 1):
            if all(item.excess <= 1 for quantity in items.values() for item in quantity):
                break
            if chance == len(self._alone):
                self._alone.append(self._run_alone(chance))
            own = _larger(own, errors(self._alone[chance][step].snapshot, truth))
            items = self._judged(found, own, step)
        for quantity, more in items.items():
            self._items[quantity] += more

    def report(self, model: str, steps: int, samples: int, replicas: Replicas) -> Report:
        """The verdict over all steps."""
        report = Report(
            model=model,
            layout=self._layout,
            dtype=str(self._dtype).removeprefix("torch."),
            samples=samples,
            steps=steps,
            seed=self._seed,
            quantities=tuple(Quantity.of(name, items) for name, items in self._items.items()),
            replicas=replicas,
            notes=tuple(self._notes),
        )
        if any(step.draws for step in self.truth) and not report.passed:
            hint = UNCONTROLLED if self.uncontrolled else DRAWS
            report = dataclasses.replace(report, notes=(hint, *report.notes))
        return report

    def close(self) -> None:
        """Ask the reference no more."""
        self._reference.close()

    @property
    def uncontrolled(self) -> bool:
        """Whether the net draws random numbers that do not follow the global sample."""
        return any(step.uncontrolled for step in self.truth)

    def _run_alone(self, chance: int | None) -> list[ReferenceStep]:
        states = [step.state for step in self.truth]
        moved = None if chance is None else self._seed + 1 + 1000 * chance
        return self._reference.train(self._dtype, states=states, moved=moved)

    def _judged(self, found: _Errors, own: _Errors, step: int) -> dict[str, list[TensorReport]]:
        items: dict[str, list[TensorReport]] = {}
        for quantity, by_name in found.items():
            known = {name: own[quantity].get(name, 0.0) for name in by_name}
            if not self._wide:
                known = dict.fromkeys(known, max(known.values(), default=0.0))
            items[quantity] = [
                TensorReport(
                    quantity,
                    name,
                    step,
                    error,
                    known[name],
                    tolerance(known[name], "float64" if self._wide else "float32"),
                )
                for name, error in by_name.items()
            ]
        return items

    def _tell_not_finite(self, who: str, values: StepResult) -> None:
        found = list(not_finite(values))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            self._notes[f"{who} gives NaN or infinity: {', '.join(found[:3])}{more}"] = None


def _larger(one: _Errors, other: _Errors) -> _Errors:
    return {
        quantity: {name: max(error, other[quantity][name]) for name, error in by_name.items()}
        for quantity, by_name in one.items()
    }
