"""Activations that are not kept but computed again in backward, without a message.

The program is divided into segments of about equal memory. Of each only what crosses its borders is kept,
and what it received: strips of neighbours, statistics, sums. Backward runs a segment again from these, which
communicates nothing, and updates no buffer: nothing of what a net does besides computing is done twice.

    forward    | segment 1 | segment 2 | segment 3 |      keeps v4, v9 and what was received
    backward                           | 3 again, and its backward
                           | 2 again, and its backward
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold import comm
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.program.costs import fastest
from fivefold.parallel.program.program import Compute, Move, Program

__all__ = [
    "Recompute", "StepSpan", "divided", "measured_span", "recomputed", "segment_of", "segments", "spans_of",
]  # fmt: skip

Recompute = int | str
"""none (or 0), auto, all, or the number of segments of the whole net"""
_NODES, _LOOKS = 4, 16
"""of a span, and how often it is computed, to know what it takes beside its nodes"""


def segments(recompute: Recompute, steps: int) -> int:
    """Into how many segments a run of steps is divided; 0: everything is kept."""
    if isinstance(recompute, int):
        return recompute
    # As many borders are kept as a segment has steps, so that both take about the same memory.
    return {"none": 0, "all": 1, "auto": max(round(math.sqrt(steps)), 1)}[recompute]


@dataclass(frozen=True)
class StepSpan:
    """Some steps of a program, one after the other."""

    first: int
    stop: int
    takes: tuple[int, ...]
    """values made before that it reads"""
    gives: tuple[int, ...]
    """values it makes that are read later"""


def divided(
    program: Program,
    parts: int,
    wanted: set[int],
    sizes: Callable[[int], int],
    span: range | None = None,
) -> list[StepSpan]:
    """Cut steps of a program, all by default, into `parts` segments whose values take about the same memory.

    `wanted` are values that are read by others in the end, `sizes` gives the bytes of a value.
    """
    made = [_made(step) for step in program.steps]
    span = range(len(made)) if span is None else span
    whole = sum(sizes(index) for number in span for index in made[number])
    bounds, total = [span.start], 0
    for number in span:
        if total >= whole * len(bounds) / parts and number > bounds[-1] and len(bounds) < parts:
            bounds.append(number)
        total += sum(map(sizes, made[number]))
    bounds.append(span.stop)
    return [
        _segment(program, made, wanted, first, stop)
        for first, stop in itertools.pairwise(bounds)
        if first < stop
    ]


def segment_of(program: Program, wanted: set[int], span: range) -> StepSpan:
    """Steps of a program as one segment."""
    made = [_made(step) for step in program.steps]
    return _segment(program, made, wanted, span.start, span.stop)


def spans_of(program: Program, choice: Choice, span: range) -> list[tuple[range, bool]]:
    """The steps of each span of a choice that are among `span`, and whether they are computed again."""
    numbers = program.node_numbers
    first, stop = numbers[span.start], numbers[span.stop - 1] + 1
    found: list[tuple[range, bool]] = []
    for one in choice.within(first, stop):
        steps = range(bisect_left(numbers, one.first), bisect_left(numbers, one.stop))
        steps = range(max(steps.start, span.start), min(steps.stop, span.stop))
        found.append((steps, one.again))
    return found


def _segment(
    program: Program, made: Sequence[tuple[int, ...]], wanted: set[int], first: int, stop: int
) -> StepSpan:
    own = {index for indices in made[first:stop] for index in indices}
    takes = {index for step in program.steps[first:stop] for index in _read(step)} - own
    gives = {i for i in own if i in wanted or program.last_use.get(i, -1) >= stop}
    return StepSpan(first, stop, tuple(sorted(takes)), tuple(sorted(gives)))


def _made(step: Move | Compute) -> tuple[int, ...]:
    return (step.target,) if isinstance(step, Move) else step.node.outputs


def _read(step: Move | Compute) -> list[int]:
    refs = (step.source,) if isinstance(step, Move) else step.operands
    return [ref.index for ref in refs if isinstance(ref, Value)]


def recomputed(
    run: Callable[[Mapping[int, Tensor], bool], Mapping[int, Tensor]],
    segment: StepSpan,
    values: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """What `run` makes in a segment of `values`, of which backward computes again what it needs.

    `run` is told whether it runs again: what it then does besides computing has been done.
    """
    log = comm.Log()

    def body(*taken: Tensor) -> tuple[Tensor, ...]:
        with log.turn() as again:
            made = run(dict(zip(segment.takes, taken, strict=True)), again)
            return tuple(made[index] for index in segment.gives)

    taken = [values[index] for index in segment.takes]
    given = checkpoint(body, *taken, use_reentrant=False, preserve_rng_state=False)
    return dict(zip(segment.gives, given, strict=True))


@functools.cache
def measured_span(device: torch.device) -> float:
    """Seconds that a span which is computed again takes beside its nodes: what torch does around them."""
    x = torch.ones(64, device=device, requires_grad=True)
    segment = StepSpan(0, _NODES, (0,), (1,))

    def run(taken: Mapping[int, Tensor], again: bool = False) -> dict[int, Tensor]:  # noqa: ARG001
        made = taken[0]
        for _ in range(_NODES):
            made = made * made
        return {1: made}

    def trained(made: Mapping[int, Tensor]) -> Tensor:
        return torch.autograd.grad(made[1].sum(), x)[0]

    with torch.enable_grad():
        again_s = fastest(lambda: trained(recomputed(run, segment, {0: x})), _LOOKS)
        once_s = fastest(lambda: trained(run({0: x})), _LOOKS)
    with torch.no_grad():
        nodes_s = fastest(lambda: run({0: x})[1], _LOOKS)
    return max(again_s - once_s - nodes_s, 0.0)
