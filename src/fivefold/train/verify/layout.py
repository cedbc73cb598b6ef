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
from fivefold.mesh import Mesh, Part, part_of
from fivefold.parallel import parallelize
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
        self._net, self._mesh = net, mesh

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
        self.model.on_outputs = seen.append
        with seeded(seed, self._mesh.device) if uncontrolled else nullcontext():
            own = self.model.shard(map_tensors(torch.clone, inputs), targets)
            loss = self.model.step(*own)
        self.optimizer.step()
        outputs = self._whole_outputs(leaves(seen[0]), rows_of(inputs, "inputs"))
        found = snapshot(self._net, loss, [])
        self._compare_replicas(found)
        return Snapshot(found.loss, outputs, found.gradients, found.buffers, found.weights)

    def _whole_outputs(self, found: list[Tensor], total: int) -> dict[str, Tensor]:
        """Outputs of all samples in order. Those whose leading dim is not the samples are left out."""
        names = ["output"] if len(found) == 1 else [f"output {i}" for i in range(len(found))]
        parts = [part_of(leaf) or self._by_samples(leaf, total) for leaf in found]
        told = torch.tensor([part is not None for part in parts], device=self._mesh.device)
        agreed = self._everyone(told).all(0).tolist()
        return {
            name: self._assembled(_sendable(leaf), part)
            for name, leaf, part, follows in zip(names, found, parts, agreed, strict=True)
            if follows and part is not None
        }

    def _by_samples(self, leaf: Tensor, total: int) -> Part | None:
        """Which part of the whole batch's an output is, if it follows the samples."""
        mine = self._mesh.share(total)
        held = max(len(mine), 1)  # an empty share computes one stand-in
        if not leaf.dim() or leaf.shape[0] not in (len(mine), held):
            return None
        return Part((total, *leaf.shape[1:]), (mine.start, *(0,) * (leaf.dim() - 1)))

    def _assembled(self, leaf: Tensor, part: Part) -> Tensor:
        """The whole that every rank has a part of."""
        rows = len(self._mesh.share(part.shape[0])) if leaf.shape[0] else 0
        leaf = leaf[:rows] if leaf.shape[0] > rows else leaf
        device = self._mesh.device
        boxes = self._everyone(torch.tensor([part.origin, leaf.shape], device=device)).tolist()
        largest = max(math.prod(shape) for _, shape in boxes)
        sent = leaf.new_zeros(largest)
        sent[: leaf.numel()] = leaf.reshape(-1)
        whole = leaf.new_zeros(part.shape)
        for (origin, shape), numbers in zip(boxes, self._everyone(sent), strict=True):
            where = tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))
            whole[where] = numbers[: math.prod(shape)].view(shape)
        return whole

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
