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
from fivefold.train.verify.judge import Judge
from fivefold.train.verify.layout import OnLayout
from fivefold.train.verify.one_process import cast_net
from fivefold.train.verify.reference import CannotRun, Named, Reference, seeded
from fivefold.train.verify.report import Report

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
        return str(mesh.layout)
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
