"""Proof that a layout computes what one process computes: step by step, from the same state.

    state ──┬── one process, whole batch ───────────────► truth ──► the next step's state
            ├── one process, input moved by one ulp ────► its own reaction     (float32: the step in float32)
            └── all ranks, each its share ──────────────► errors against truth (measure)

Rank 0 runs the reference; everyone starts the layout's step from the reference's state, so that an error
is the error of one step and not of a trajectory, which amplifies any difference.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import cattrs
import torch
from torch import nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.plan import AXES
from fivefold.train.verify.judge import Judge
from fivefold.train.verify.layout import OnLayout
from fivefold.train.verify.reference import State, cast_net, cast_tree, sgd
from fivefold.train.verify.report import Report

__all__ = ["verify"]


def verify(
    net: nn.Module,
    mesh: Mesh,
    *,
    loss: Callable[..., Any],
    batch: Callable[[int], tuple[Any, Any]],
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Compare a layout with one process that trains the unmodified net. Collective; all ranks get the report.

    Args:
        net: the plain net; the weights of the first rank's count. It is converted to `dtype`, moved to
            the mesh's device, and trained: do not use it afterwards.
        mesh: the layout in question. `plan.parallel` says how batch norm is computed, `plan.numerics.seed`
            what the random masks derive from.
        loss: `loss(outputs, targets) -> scalar`, as for `parallelize`.
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
    net = cast_net(net.to(mesh.device), dtype).train()
    judge = Judge(net, mesh, loss, dtype) if mesh.rank == 0 else None
    state = State.of(net, sgd(net), dtype)
    layout = OnLayout(net, mesh, loss, dtype, example=batch(0)[0])
    if judge:
        judge.divide(layout.micro_batches, layout.schedule)
    samples = 0
    for step in range(steps):
        inputs, targets = (
            cast_tree(map_tensors(lambda leaf: leaf.to(mesh.device), tree), dtype)
            for tree in batch(step)
        )
        samples = samples or leaves(inputs)[0].shape[0]
        told = json.dumps(judge.reference(state, inputs, targets, step) if judge else {})
        answer = json.loads(_told(told, mesh))
        if answer["problem"]:
            raise UsageError(answer["problem"])
        state = layout.shared(state)
        got = layout.step(state, inputs, targets, step, uncontrolled=answer["uncontrolled"])
        if judge:
            state = judge.compare(got)
    report = judge.report(steps, samples, layout.replicas) if judge else None
    told = json.dumps(dataclasses.asdict(report)) if report else ""
    return cattrs.structure(json.loads(_told(told, mesh)), Report)


def _told(text: str, mesh: Mesh) -> str:
    return comm.broadcast_text(text, mesh.group(*AXES), mesh.device)
