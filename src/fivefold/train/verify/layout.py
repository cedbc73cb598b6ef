"""The side of a verification that is verified: a parallel model, one step at a time, and what came of it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.mesh import Mesh, Part, part_of
from fivefold.parallel import parallelize
from fivefold.parallel.sharded import placed, whole
from fivefold.parallel.trees import leaves, map_tensors, rows_of
from fivefold.plan import AXES
from fivefold.trace import Tag
from fivefold.train.verify.measure import StepResult
from fivefold.train.verify.reference import OPTIMIZER, seeded
from fivefold.train.verify.report import Replicas

__all__ = ["OnLayout"]


class OnLayout:
    """A net on all ranks. `replicas` is the worst difference between ranks over the steps so far."""

    def __init__(
        self, net: nn.Module, mesh: Mesh, loss: Callable[..., Any], *, example: Any
    ) -> None:
        example = example if mesh.layout.pipe > 1 else None
        self.model = parallelize(net, mesh, example=example, loss=loss)
        trained = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, **OPTIMIZER)
        self.replicas = Replicas()
        self._net, self._mesh = net, mesh

    @property
    def schedule(self) -> str:
        """How a pipe axis works, in words; empty where there is none."""
        if self.model.stages is None:
            return ""
        made = self.model.stages.schedule
        many = f" over {made.micro_batches} micro-batches" if made.micro_batches > 1 else ""
        return f" ({made.name}{many})"

    def start(self, state: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Put net and optimiser to the first rank's `state`, without gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        state = self._shared(state)
        with torch.no_grad():
            for name, parameter in self._net.named_parameters():
                parameter.copy_(placed(state["weights"][name], parameter))
                if name in state["momentum"] and not parameter.is_meta:
                    momentum = placed(state["momentum"][name], parameter)
                    self.optimizer.state[parameter]["momentum_buffer"] = momentum
            for name, buffer in self._net.named_buffers():
                if name in state["buffers"]:  # else the net has made it in its first forward
                    buffer.copy_(state["buffers"][name])

    def _shared(
        self, state: Mapping[str, Mapping[str, Tensor]] | None
    ) -> dict[str, dict[str, Tensor]]:
        group, device = self._mesh.group(*AXES), self._mesh.device
        told = [
            [kind, name, [*tensor.shape], str(tensor.dtype).removeprefix("torch.")]
            for kind, tensors in (state or {}).items()
            for name, tensor in tensors.items()
        ]
        told = json.loads(comm.broadcast_text(json.dumps(told), group, device))
        found: dict[str, dict[str, Tensor]] = {"weights": {}, "buffers": {}, "momentum": {}}
        for kind, name, shape, dtype in told:
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            found[kind][name] = made if state is None else made.copy_(state[kind][name])
        every = [tensor for tensors in found.values() for tensor in tensors.values()]
        comm.broadcast_all(every, group, Tag.CONTROL)
        return found

    def step(self, inputs: Any, targets: Any, number: int, *, uncontrolled: bool) -> StepResult:
        """Train one step on the whole mesh; the snapshot's outputs are of the whole batch.

        With `uncontrolled` randomness, rank 0's generators start as the reference's and all others
        differently, as in a real run.
        """
        self.model.steps = number
        seed = self._mesh.plan.numerics.seed + 1 + number + 1_000_003 * self._mesh.rank
        seen: list[Any] = []
        self.model.on_outputs = seen.append
        with seeded(seed, self._mesh.device) if uncontrolled else nullcontext():
            own = self.model.shard(map_tensors(torch.clone, inputs), targets)
            loss = self.model.step(*own)
        self.optimizer.step()
        outputs = self._whole_outputs(seen, rows_of(inputs, "inputs"))
        found = self._of_all_stages(_snapshot(self._net, loss))
        self._compare_replicas(found)
        return replace(found, outputs=outputs)

    def _of_all_stages(self, found: StepResult) -> StepResult:
        """With what other ranks of the pipe axis hold; what this rank holds stays its own."""
        stages = self.model.stages
        if stages is None:
            return found
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}.keys()

        def whole(values: Mapping[str, Tensor | None]) -> dict[str, Any]:
            every = stages.everywhere(values)
            return {name: values[name] if name in held else every[name] for name in values}

        return replace(
            found,
            gradients=whole(found.gradients),
            buffers=whole(found.buffers),
            weights=whole(found.weights),
        )

    def _whole_outputs(self, seen: list[Any], total: int) -> dict[str, Tensor]:
        """Outputs of all samples in order. Those whose leading dim is not the samples are left out.

        A rank has seen the outputs of its samples and its tile, of some micro-batches; or none, if the last
        stage is not its.
        """
        own = [
            (number, part_of(leaf) or self._by_samples(leaf, total), leaf)
            for outputs in seen
            for number, leaf in enumerate(leaves(outputs))
        ]
        told = [
            {
                "number": number,
                "part": None if part is None else [*part.shape],
                "origin": None if part is None else [*part.origin],
                "piece": _real_rows(leaf, part, self._mesh),
            }
            for number, part, leaf in own
        ]
        pieces = [piece for rank in gathered(told, self._mesh) for piece in rank]
        count = 1 + max(piece["number"] for piece in pieces)
        found: dict[str, Tensor] = {}
        for number in range(count):
            name = "output" if count == 1 else f"output {number}"
            mine = [piece for piece in pieces if piece["number"] == number]
            if all(piece["part"] is not None for piece in mine):
                found[name] = _assembled(mine).to(self._mesh.device)
        return found

    def _by_samples(self, leaf: Tensor, total: int) -> Part | None:
        """Which part of the whole batch's an output is, if it follows the samples."""
        mine = self._mesh.share(total)
        held = max(len(mine), 1)  # an empty share computes one stand-in
        if not leaf.dim() or leaf.shape[0] not in (len(mine), held):
            return None
        return Part((total, *leaf.shape[1:]), (mine.start, *(0,) * (leaf.dim() - 1)))

    def _compare_replicas(self, found: StepResult) -> None:
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


def _snapshot(net: nn.Module, loss: Tensor) -> StepResult:
    """Copies of what a step has left in `net`, with its loss."""
    return StepResult(
        loss={"loss": loss.detach().clone()},
        outputs={},
        gradients={
            n: None if p.grad is None else whole(p.grad).clone() for n, p in net.named_parameters()
        },
        buffers={n: b.detach().clone() for n, b in net.named_buffers()},
        weights={n: whole(p.detach()).clone() for n, p in net.named_parameters()},
    )


def gathered(value: Any, mesh: Mesh) -> list[Any]:
    """What every rank tells: lists, dicts, strings, numbers and tensors, on the CPU."""
    stream = io.BytesIO()
    torch.save(value, stream)
    told = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).to(mesh.device)
    group = mesh.group(*AXES)
    sizes = comm.all_gather(torch.tensor([len(told)], device=mesh.device), group, Tag.CONTROL)
    padded = told.new_zeros(int(sizes.max()))
    padded[: len(told)] = told
    every = comm.all_gather(padded, group, Tag.CONTROL).cpu()
    return [
        torch.load(io.BytesIO(row[:size].numpy().tobytes()), map_location="cpu", weights_only=True)
        for row, size in zip(every, sizes.flatten().tolist(), strict=True)
    ]


def _real_rows(leaf: Tensor, part: Part | None, mesh: Mesh) -> Tensor | None:
    """A piece of an output, without the stand-in of an empty share."""
    if part is None:
        return None
    empty = not len(mesh.share(part.shape[0]))
    return (leaf[:0] if empty else leaf).detach().cpu().clone()


def _assembled(pieces: list[dict[str, Any]]) -> Tensor:
    """The whole that ranks have parts of."""
    whole = pieces[0]["piece"].new_zeros(pieces[0]["part"])
    for piece in pieces:
        origin, shape = piece["origin"], piece["piece"].shape
        whole[tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))] = piece["piece"]
    return whole


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
