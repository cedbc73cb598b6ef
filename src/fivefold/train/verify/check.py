"""Proof that a layout computes what one process computes: step by step, from the same state.

    state ──┬── one process, whole batch ───────────────► truth ──► the next step's state
            ├── one process, input moved by one ulp ────► its own reaction     (float32: the step in float32)
            └── all ranks, each its share ──────────────► errors against truth (measure)

Rank 0 asks the reference; everyone starts the layout's step from the reference's state, so that an error
is the error of one step and not of a trajectory, which amplifies any difference.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Generator
from typing import Any

import cattrs
import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, owned
from fivefold.parallel.pipeline.batch import Schedules
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.plan import AXES
from fivefold.train.verify.layout import OnLayout
from fivefold.train.verify.measure import QUANTITIES, StepResult, errors, not_finite
from fivefold.train.verify.one_process import cast_net
from fivefold.train.verify.reference import CannotRun, Named, Reference, ReferenceStep, seeded
from fivefold.train.verify.report import Quantity, Replicas, Report, TensorReport, tolerance

__all__ = ["verify"]

_building = threading.Lock()
"""random generators are the process's, which may have several ranks"""
_within: list[torch.dtype] = []
"""of ranks that are verifying, the default dtype before"""


def verify(
    build: Callable[[], Any],
    mesh: Mesh,
    *,
    loss: Callable[..., Any] | None,
    batch: Callable[[int], tuple[Any, Any]],
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Compare a layout with one process that trains the unmodified net. Collective; all ranks get the report.

    Args:
        build: makes the plain net, or the net and its loss where the loss needs the net. It is called with
            the same random seed for the layout and, anew, for every run of one process, so that neither sees
            a copy. Nets are converted to `dtype`.
        mesh: the layout in question. `plan.parallel` says how batch norm is computed, `plan.numerics.seed`
            what the random masks derive from.
        loss: `loss(outputs, targets) -> scalar`, as for `parallelize`. None if `build` returns one. If both
            are `Named`, the net is trained in a process of its own, else in this one.
        batch: `batch(step) -> (inputs, targets)`, the whole batch, the same on every rank. A tuple of
            inputs is positional arguments, a dict keyword arguments; samples are on the leading dim.
        steps: how many, each from the state that the reference has reached.
        dtype: float64, or float32, which is compared with a float64 reference.

    Raises:
        PlanError: the layout has axes that this version cannot compute on.
        UsageError: the net cannot be run by one process, or not by Fivefold; or a bad argument.
    """
    if dtype not in (torch.float64, torch.float32):
        raise UsageError(f"verify works in float64 or float32, not {dtype}")
    if steps < 1:
        raise UsageError(f"steps = {steps}: at least one is needed")
    if isinstance(build, nn.Module):
        raise UsageError("verify builds the net twice: give it a function that returns the net")
    with _by_default(dtype):
        return _verified(build, loss, [batch(step) for step in range(steps)], mesh, dtype)


@contextlib.contextmanager
def _by_default(dtype: torch.dtype) -> Generator[None]:
    """A net that makes tensors of its own, `torch.zeros(n)`, makes them in the dtype it is run in."""
    with _building:
        _within.append(torch.get_default_dtype())
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        with _building:
            before = _within.pop()
            if not _within:
                torch.set_default_dtype(before)


def _verified(
    build: Callable[[], Any],
    loss: Any,
    batches: list[tuple[Any, Any]],
    mesh: Mesh,
    dtype: torch.dtype,
) -> Report:
    batches = [_cast(batch, dtype) for batch in batches]
    judge = _judged(build, loss, batches, mesh, dtype)
    with contextlib.nullcontext() if judge is None else contextlib.closing(judge):
        return _compared(judge, build, loss, batches, mesh, dtype)


def _compared(  # noqa: PLR0917 - what verify was given
    judge: Judge | None,
    build: Callable[[], Any],
    loss: Any,
    batches: list[Any],
    mesh: Mesh,
    dtype: torch.dtype,
) -> Report:
    net, loss = _built(build, loss, mesh, dtype)
    layout = OnLayout(net, mesh, loss, example=batches[0][0])
    uncontrolled = _told("yes" if judge and judge.uncontrolled else "", mesh) == "yes"
    problem = ""
    for step, trees in enumerate(batches):
        layout.start(judge.truth[step].state if judge else None)
        inputs, targets = (map_tensors(lambda leaf: leaf.to(mesh.device), tree) for tree in trees)
        got = layout.step(inputs, targets, step, uncontrolled=uncontrolled)
        if judge and not problem:
            try:
                judge.compare(got, step)
            except CannotRun as cannot:  # others wait for the verdict
                problem = f"one process alone could not train the model again: {cannot}"
    problem = _told(problem, mesh)
    if problem:
        raise UsageError(problem)
    samples, model = leaves(batches[0][0])[0].shape[0], type(net).__name__
    report = judge.report(model, len(batches), samples, layout.replicas) if judge else None
    told = json.dumps(dataclasses.asdict(report)) if report else ""
    return cattrs.structure(json.loads(_told(told, mesh)), Report)


def _judged(
    build: Callable[[], Any], loss: Any, batches: list[Any], mesh: Mesh, dtype: torch.dtype
) -> Judge | None:
    """What rank 0 judges by; None elsewhere. Collective. Raises `UsageError` on all ranks."""
    judge, problem = None, ""
    if mesh.rank == 0:
        schedules = Schedules(mesh) if mesh.layout.pipe > 1 else None
        totals = [leaves(inputs)[0].shape[0] for inputs, _ in batches]
        reference = Reference(
            build,
            loss,
            batches,
            [_micro_batches(schedules, mesh, total) for total in totals],
            seed=mesh.plan.numerics.seed,
            device=mesh.device,
        )
        try:
            judge = Judge(reference, mesh, dtype, _described(schedules, mesh))
        except CannotRun as cannot:
            reference.close()
            shapes = [", ".join(str(tuple(leaf.shape)) for leaf in leaves(t)) for t in batches[0]]
            problem = (
                f"one process alone cannot train the model on inputs of shape {shapes[0] or 'none'} with "
                f"targets of shape {shapes[1] or 'none'}: {cannot}"
            )
    problem = _told(problem, mesh)
    if problem:
        raise UsageError(problem)
    return judge


def _described(schedules: Schedules | None, mesh: Mesh) -> str:
    """The layout, and how a pipe axis works."""
    if schedules is None:
        turns = mesh.plan.tiles.turns
        return f"{mesh.layout}, by turns of {turns}" if turns else str(mesh.layout)
    usual = schedules.usual
    many = f" over {usual.micro_batches} micro-batches" if usual.micro_batches > 1 else ""
    return f"{mesh.layout} ({usual.name}{many})"


def _micro_batches(schedules: Schedules | None, mesh: Mesh, total: int) -> list[list[int]] | None:
    """Which samples each micro-batch of all replicas has; None if batches are computed at once."""
    if schedules is None or schedules.usual.micro_batches == 1:
        return None
    count, data = schedules.of(total).micro_batches, mesh.layout.data
    replicas = [owned(total, data, replica) for replica in range(data)]
    return [
        [mine[i] for mine in replicas for i in owned(len(mine), count, micro)]
        for micro in range(count)
    ]


def _built(
    build: Callable[[], Any], loss: Any, mesh: Mesh, dtype: torch.dtype
) -> tuple[nn.Module, Callable[..., Any]]:
    """The net and the loss of the layout, as `one_process` builds its own."""
    with _building, seeded(mesh.plan.numerics.seed, mesh.device):
        net = build()
        if loss is None:
            net, loss = net
        elif isinstance(loss, Named):
            loss = loss()
        elif isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss)
        cast_net(net.to(mesh.device), dtype)
        if isinstance(loss, nn.Module):
            loss.to(mesh.device, dtype)
    return net.train(), loss


def _cast(batch: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Inputs and targets with their floating-point tensors in `dtype`."""

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    inputs, targets = batch
    return map_tensors(cast, inputs), map_tensors(cast, targets)


def _told(text: str, mesh: Mesh) -> str:
    return comm.broadcast_text(text, mesh.group(*AXES), mesh.device)


# ---- What rank 0 alone does in a verification: run the reference, and judge the layout by it
#
# In float32 a rounding may decide on which side of zero the input of a ReLU falls. Then the gradients jump by
# a percent, in one process as well as in any layout, and one run of one process may happen not to show it.
# So where the layout exceeds its tolerance, one process gets more chances: runs whose inputs differ by one
# ulp, until its own error explains the layout's or `CHANCES` runs have not. A wrong layout finds no such run.

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
