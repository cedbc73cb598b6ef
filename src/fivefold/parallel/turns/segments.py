"""A program in segments, each of which begins with steps that ask other turns, the first one apart.

steps     v1 = conv(v0)   v1' = halo of v1   v2 = batch norm(v1')   v3 = relu(v2)   v4' = halo of v3 ...
asks                      yes                yes                                    yes
segments  | 0            | 1                                                       | 2
head of 1                 ..................................
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fivefold.parallel.program.program import Compute, Move, Program
from fivefold.parallel.program.recompute import StepSpan, segment_of
from fivefold.parallel.program.run import returned

__all__ = ["HELD", "Segment", "segments_of"]

HELD = "held"
"""with the number of a segment: how many bytes backward was found to need of it; in `Program.found`"""


@dataclass(frozen=True)
class Segment:
    """Some steps of a program, one after the other."""

    span: StepSpan
    head: range
    """its first steps, within which it asks; empty for the first segment if that does not"""
    dies: tuple[int, ...]
    """values that nobody reads after it"""

    @property
    def steps(self) -> range:
        """All of them."""
        return range(self.span.first, self.span.stop)


def segments_of(program: Program) -> list[Segment]:
    """Those of a program, found once."""
    if "segments" not in program.found:
        program.found["segments"] = _divided(program, returned(program))
    return program.found["segments"]


def _divided(program: Program, wanted: set[int]) -> list[Segment]:
    heads = _heads(program)
    bounds = [0, *(head.start for head in heads if head.start), len(program.steps)]
    by_start = {head.start: head for head in heads}
    found: list[Segment] = []
    for first, stop in itertools.pairwise(bounds):
        dying = {index for step in program.dying[first:stop] for index in step}
        span = segment_of(program, wanted, range(first, stop))
        head = by_start.get(first, range(first, first))
        found.append(Segment(span, head, tuple(sorted(dying - wanted))))
    return found


def _heads(program: Program) -> list[range]:
    """Steps that ask, with those that only lay out what was asked for between them."""
    found: list[range] = []
    number = 0
    while number < len(program.steps):
        if not _asks(program.steps[number]):
            number += 1
            continue
        stop = number + 1
        while stop < len(program.steps) and isinstance(program.steps[stop - 1], Move):
            step = program.steps[stop]
            if isinstance(step, Compute) and not _asks(step):
                break
            stop += 1
        found.append(range(number, stop))
        number = stop
    return found


def _asks(step: Move | Compute) -> bool:
    if isinstance(step, Move):
        return step.exchange.moves
    return step.local.collective is not None
