"""What every step of a program takes on this rank, forward and backward, measured without other ranks.

    plan, rank ─► fake mesh ─► net in tiles ─► its steps, one by one: forward, backward at once, let go

The steps are those that a rank carries out, halos, statistics and what the executor itself takes included;
only what others send never comes. Each is differentiated before the next one begins, so that no more memory
is needed than the largest step takes, however deep the net is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.mesh import Mesh, attach, part_of
from fivefold.mesh.fake import fake_mesh
from fivefold.parallel.graph.hooks import Hooked
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.intercept import Share
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Prepared
from fivefold.parallel.program.program import Compute, Program
from fivefold.parallel.program.run import carry_out, execute
from fivefold.parallel.trees import call_with, leaves, map_tensors
from fivefold.plan import AXES, Memory, Plan
from fivefold.trace import Tag

__all__ = ["Timed", "agreed_node_s", "timed"]


_CACHE_BYTES = 128 << 20
"""more than a core's share of any cache"""


@dataclass(frozen=True)
class Timed:
    """Seconds of the steps of a program, by step."""

    program: Program
    forward_s: np.ndarray
    backward_s: np.ndarray

    def node_s(self) -> list[float]:
        """Forward and backward of every node, with the exchanges in front of it."""
        found: list[float] = []
        waiting = 0.0
        for step, there, back in zip(
            self.program.steps, self.forward_s, self.backward_s, strict=True
        ):
            waiting += float(there + back)
            if isinstance(step, Compute):
                found.append(waiting)
                waiting = 0.0
        return found


def timed(
    net: nn.Module,
    plan: Plan,
    rank: int,
    example: Any,
    *,
    costs: Costs | None = None,
    repeats: int = 3,
    kept: bool = False,
) -> Timed:
    """Time the steps of `rank` for a batch of the shapes of `example`, the same for every replica.

    The whole net is computed, as if the layout had no `pipe` axis. Medians of `repeats` runs; one more comes
    first. The net's numbers and gradients are afterwards what they were.

    Args:
        net: the plain net, where it shall compute.
        plan: layout and tiles of it count.
        rank: of all ranks of the layout.
        example: inputs with the shapes of the samples of one replica, or of its micro-batch.
        costs: what plans of tiles go by; typical ones by default.
        repeats: how many runs are timed.
        kept: whether memory is used as training does: all steps are kept before the first is differentiated,
            and the sum of all is what forward and backward take in one piece. Steps that are timed one by
            one only say then how that is distributed: each of them pays for being looked at, and may find in
            the cache what in training is long gone.

    Raises `UsageError` for what cannot be computed in tiles.
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    plain = dataclasses.replace(plan, memory=Memory())
    with fake_mesh(plain, rank, device) as mesh, _unchanged(net):
        tiles = RecordedNet(net, mesh, costs or Costs(), apart=True)
        ready = _prepared(tiles, example, mesh)
        for node in ready.program.tape.nodes:
            if isinstance(node.function, Hooked):  # the user's, who counts their calls perhaps
                node.function.hooks.clear()
        runs = [_run(tiles, ready, kept) for _ in range(repeats + 1)]
        found = np.median(np.array(runs[1:]), axis=0)
        if kept:
            whole = [_at_once(tiles, ready) for _ in range(repeats + 1)]
            found *= np.median(np.array(whole[1:]), axis=0) / np.maximum(found.sum(axis=0), 1e-9)
    return Timed(ready.program, found[:, 0], found[:, 1])


def agreed_node_s(net: nn.Module, mesh: Mesh, example: Any, costs: Costs) -> list[float]:
    """Seconds of every node, the median of all ranks, which measure at the same time. Collective."""
    own = timed(net, mesh.plan, mesh.rank, example, costs=costs).node_s()
    told = torch.tensor(own, dtype=torch.float64, device=mesh.device)
    return comm.all_gather(told, mesh.group(*AXES), Tag.CONTROL).median(dim=0).values.tolist()


def _prepared(tiles: RecordedNet, example: Any, mesh: Mesh) -> Prepared:
    """Random numbers for one replica."""
    rows = range(leaves(example)[0].shape[0])

    def part(leaf: Tensor) -> Tensor:
        cut = tiles.part(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), rows)
        made = torch.zeros(cut.shape, dtype=leaf.dtype, device=mesh.device)
        note = part_of(cut)
        assert note is not None
        return attach(made.uniform_() if made.is_floating_point() else made, note)

    group = mesh.group("data")
    joint = group if mesh.plan.parallel.batch_norm == "global" and group.size() > 1 else None
    share = Share(len(rows), 0, len(rows) * group.size(), 0, 1, joint)
    return tiles.prepare(call_with, [map_tensors(part, example)], share)[0]


def _run(tiles: RecordedNet, ready: Prepared, kept: bool) -> list[tuple[float, float]]:
    """Seconds of forward and backward of every step."""
    program, state = ready.program, _without_hooks(tiles, ready)
    found = [(0.0, 0.0)] * len(program.steps)
    values = dict(zip(program.tape.inputs, ready.inputs, strict=True))
    waiting: list[_Forwards] = []
    for span in _together(program):
        given = {index: values[index] for index in _read(program, span)}
        begin = _now(given.values())
        made = carry_out(program, dict(given), span, set(), state=state, moment=ready.moment)
        there = _now(made.values()) - begin
        new = {index: tensor for index, tensor in made.items() if index not in given}
        own = {i: t.detach().requires_grad_(t.requires_grad) for i, t in new.items()}
        waiting.append(_Forwards(span.start, there, [(new[i], own[i]) for i in new]))
        values |= own
        for index in given:
            if program.last_use.get(index, -1) < span.stop:
                del values[index]
        if not kept:
            found[span.start] = waiting.pop().times(state.values())
    while waiting:
        last = waiting.pop()
        found[last.first] = last.times(state.values())
    return found


def _at_once(tiles: RecordedNet, ready: Prepared) -> tuple[float, float]:
    """Seconds of forward and of backward of the whole net, in front of each of which others had the cache."""
    program, state = ready.program, _without_hooks(tiles, ready)
    others = torch.ones(_CACHE_BYTES // 4)
    others.add_(1)
    begin = _now(ready.inputs)
    made = execute(program, ready.inputs, state, ready.moment)
    results = [tensor for tensor in made.values() if tensor.requires_grad]
    there_s = _now(results) - begin
    grads = [torch.ones_like(tensor) for tensor in results]
    others.add_(1)
    begin = _now(grads)
    torch.autograd.backward(results, grads)
    back_s = _now(grads) - begin
    for tensor in state.values():
        tensor.grad = None
    return there_s, back_s


def _without_hooks(tiles: RecordedNet, ready: Prepared) -> dict[str, Tensor]:
    """The net's tensors, in the same memory, but without the hooks that the user has registered on them."""
    return {
        name: tensor.detach().requires_grad_(tensor.requires_grad)
        for name, tensor in tiles.state(ready).items()
    }


@dataclass(frozen=True)
class _Forwards:
    """Steps that were carried out and wait to be differentiated."""

    first: int
    there_s: float
    results: list[tuple[Tensor, Tensor]]
    """with their graph, and as others read them, who leave their gradient there"""

    def times(self, states: Iterable[Tensor]) -> tuple[float, float]:
        """Seconds of forward, and of backward; gradients of parameters are let go.

        A value that several steps read adds up its gradients.
        """
        pairs = [(made, read) for made, read in self.results if made.grad_fn is not None]
        grads = [torch.ones_like(m) if read.grad is None else read.grad for m, read in pairs]
        begin = _now(grads)
        if pairs:
            torch.autograd.backward([made for made, _ in pairs], grads)
        back_s = _now(grads) - begin
        for tensor in states:
            tensor.grad = None
        return self.there_s, back_s


def _now(tensors: Iterable[Tensor]) -> float:
    """Seconds, once whatever computes on the device of some tensors is done."""
    device = next((tensor.device for tensor in tensors), None)
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _together(program: Program) -> Generator[range]:
    """Steps of which the later ones change in place what the first one makes: it is told for all."""
    first = 0
    for number in range(1, len(program.steps) + 1):
        step = program.steps[number] if number < len(program.steps) else None
        if not (isinstance(step, Compute) and step.in_place):
            yield range(first, number)
            first = number


def _read(program: Program, span: range) -> set[int]:
    """Values that some steps take from others."""
    steps = [program.steps[number] for number in span]
    refs = (r for s in steps for r in (s.operands if isinstance(s, Compute) else (s.source,)))
    own = {i for s in steps for i in (s.node.outputs if isinstance(s, Compute) else (s.target,))}
    return {ref.index for ref in refs if isinstance(ref, Value)} - own


@contextmanager
def _unchanged(net: nn.Module) -> Generator[None]:
    """Put back what the block does to buffers and gradients."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in net.buffers()]
    grads = [(parameter, parameter.grad) for parameter in net.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, grad in grads:
            parameter.grad = grad
