"""The side of a verification that is verified: a parallel model, one step at a time, and what came of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.mesh import Mesh, owned
from fivefold.parallel import parallelize
from fivefold.parallel.exchange import gather_rows
from fivefold.parallel.trees import leaves, map_tensors, rows_of
from fivefold.plan import AXES
from fivefold.trace import Tag
from fivefold.train.verify.measure import Snapshot
from fivefold.train.verify.reference import State, seeded, sgd, snapshot
from fivefold.train.verify.report import Replicas

__all__ = ["OnLayout"]


class OnLayout:
    """A net on all ranks. `replicas` is the worst difference between ranks over the steps so far."""

    def __init__(
        self, net: nn.Module, mesh: Mesh, loss: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).to(mesh.device, dtype)
        self.model = parallelize(net, mesh, loss=loss)
        self.optimizer = sgd(net)
        self.replicas = Replicas()
        self._net, self._mesh, self._group = net, mesh, mesh.group("data")

    def shared(self, state: State) -> State:
        """Rank 0's state, on every rank."""

        def first(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: self._everyone(value)[0] for name, value in values.items()}

        return State(first(state.weights), first(state.buffers), first(state.momentum))

    def step(
        self, state: State, inputs: Any, targets: Any, number: int, *, uncontrolled: bool
    ) -> Snapshot:
        """Train one step on the whole mesh from `state`; the snapshot's outputs are of the whole batch.

        With `uncontrolled` randomness, rank 0's generators start as the reference's and all others
        differently, as in a real run.
        """
        state.load(self._net, self.optimizer)
        self.model.steps = number
        seed = self._mesh.plan.numerics.seed + self._mesh.rank
        seen: list[Any] = []
        hook = self._net.register_forward_hook(lambda _net, _inputs, outputs: seen.append(outputs))
        try:
            with seeded(seed, self._mesh.device) if uncontrolled else nullcontext():
                own = self.model.shard(map_tensors(torch.clone, inputs), targets)
                loss = self.model.step(*own)
        finally:
            hook.remove()
        self.optimizer.step()
        outputs = self._whole_outputs(leaves(seen[0]), rows_of(inputs, "inputs"))
        found = snapshot(self._net, loss, [])
        self._compare_replicas(found)
        return Snapshot(found.loss, outputs, found.gradients, found.buffers, found.weights)

    def _whole_outputs(self, found: list[Tensor], total: int) -> dict[str, Tensor]:
        """Outputs of all samples in order. Those whose leading dim is not the samples are left out."""
        parts = self._group.size()
        counts = [len(owned(total, parts, index)) for index in range(parts)]
        rows = counts[self._group.rank()]
        held = max(rows, 1)  # an empty share computes one stand-in
        follows = [leaf.dim() > 0 and leaf.shape[0] == held for leaf in found]
        agreed = self._everyone(torch.tensor(follows, device=self._mesh.device)).all(0).tolist()
        names = ["output"] if len(found) == 1 else [f"output {i}" for i in range(len(found))]
        return {
            name: gather_rows(_sendable(leaf[:rows]), counts, self._group, Tag.CONTROL)
            for name, leaf, follow in zip(names, found, agreed, strict=True)
            if follow
        }

    def _compare_replicas(self, found: Snapshot) -> None:
        # A missing gradient counts as zero: if other ranks have one, their weights will tell.
        missing = {
            n: torch.zeros_like(found.weights[n])
            for n, gradient in found.gradients.items()
            if gradient is None
        }
        for kind in ("gradients", "buffers", "weights"):
            values: Mapping[str, Tensor | None] = getattr(found, kind)
            for name, value in values.items():
                every = self._everyone(missing[name] if value is None else value)
                for rank in range(1, every.shape[0]):
                    apart = _largest_difference(every[rank], every[0])
                    if apart > self.replicas.difference:
                        self.replicas = Replicas(apart, f"{name} ({kind}) of rank {rank}")

    def _everyone(self, value: Tensor) -> Tensor:
        return comm.all_gather(_sendable(value), self._mesh.group(*AXES), Tag.CONTROL)


def _sendable(value: Tensor) -> Tensor:
    value = value.detach()
    return value.to(torch.uint8) if value.dtype == torch.bool else value


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if not one.numel() or torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        one, other = one.double(), other.double()
    apart = float((one - other).abs().max())
    return math.inf if math.isnan(apart) else apart
