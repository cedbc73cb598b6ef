"""How much memory a candidate needs, predicted.

    parameters, gradients, their buckets, the optimiser's numbers
    + the samples
    + what micro-batches keep for backward, as many as the schedule has alive
    + the most beside it while one of them is differentiated

Not counted: workspaces of kernels, what an allocator wastes, torch itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.pipeline.simulate import ScheduleTimes
from fivefold.parallel.program.recompute import divided
from fivefold.parallel.program.run import returned
from fivefold.tune.candidates import Candidate
from fivefold.tune.saved import sizes_of
from fivefold.tune.subject import Staged

__all__ = ["OPTIMIZERS", "Need"]

OPTIMIZERS = {"sgd": 1, "adam": 2}
"""how many numbers an optimiser keeps for each parameter; sgd has momentum"""


@dataclass(frozen=True)
class Need:
    """Memory of the ranks of one replica, in the tile that is in the middle."""

    candidate: Candidate
    staged: Staged
    samples: int
    """of a replica"""
    rows: int
    """of a micro-batch"""
    copies: int
    """numbers that the optimiser keeps for each parameter"""

    def most_bytes(self, schedule: Schedule) -> int:
        """Of the rank that needs most."""
        saved, beside = self.activations()
        # Messages have left when later ones prove it: about when their gradients arrive.
        sent = [round(self.rows * size) for size in self.staged.packed_bytes]
        with_sent = [own + copies for own, copies in zip(saved, sent, strict=True)]
        timeline = ScheduleTimes(schedule, {})
        alive, leaving = timeline.peak_bytes(saved), timeline.peak_bytes(with_sent)
        return max(
            self.standing_bytes(schedule, rank)
            + max(alive[rank] + max(beside[s] for s in schedule.stages_of(rank)), leaving[rank])
            for rank in range(schedule.ranks)
        )

    def standing_bytes(self, schedule: Schedule, rank: int) -> int:
        """What is there before a step: parameters and what goes with them, and the samples."""
        stages, staged = schedule.stages_of(rank), self.staged
        trained = sum(staged.trained_bytes[stage] for stage in stages)
        copies = (not self._grows) + (self.candidate.reducers > 1) + self.copies
        samples = round(staged.takes_bytes[0] * self.samples) if 0 in stages else 0
        return sum(staged.parameter_bytes[stage] for stage in stages) + copies * trained + samples

    @property
    def _grows(self) -> bool:
        """Whether gradients come while activations go: with several micro-batches they soon are all there."""
        return self.candidate.micro_batches == 1 and self.candidate.stages_per_rank == 1

    def activations(self) -> tuple[list[int], list[int]]:
        """By stage: what a micro-batch keeps, and the most beside it while it is differentiated."""
        staged, told = self.staged, self.candidate.recompute
        each = max(round(told / self.candidate.stages), 1) if told else 0
        saved: list[int] = []
        beside: list[int] = []
        for stage, span in enumerate(staged.spans):
            scale = self.rows / staged.work.rows
            grown = 1 / scale if self._grows else 0.0
            kept, most = (
                _recomputed(staged, span, each, grown) if each else _kept(staged, span, grown)
            )
            bound = 0.0 if each else self.rows * staged.bound_bytes[stage]
            saved.append(round(kept * scale + bound))
            beside.append(round(most * scale + self.rows * self._under_way(stage)))
        return saved, beside

    def _under_way(self, stage: int) -> float:
        """Bytes per sample of messages: two that are awaited, and a gradient that has not left."""
        takes, several = self.staged.takes_bytes, self.candidate.micro_batches > 1
        front = takes[stage] if stage else 0.0
        behind = takes[stage + 1] if stage + 1 < len(takes) else 0.0
        if not several:
            return behind
        return front + (front + behind if front and behind else 2 * max(front, behind))


@functools.lru_cache(4096)
def _kept(staged: Staged, span: range, grown: float) -> tuple[float, float]:
    """Bytes that some steps keep, and the most beside it, with `grown` times the gradients made till then."""
    held = staged.work.held
    kept = float(held.saved(span).sum())
    return kept, max(held.peak_bytes(span, grown * staged.gradient_bytes) - kept, 0.0)


@functools.lru_cache(4096)
def _recomputed(staged: Staged, span: range, parts: int, grown: float) -> tuple[float, float]:
    """Bytes kept at the borders of segments and of what was received, and the most that one makes again; else
    as `_kept`.
    """
    sizes = sizes_of(staged.program, staged.here)
    wanted = returned(staged.program)
    segments = divided(staged.program, parts, wanted, lambda index: sizes.get(index, 0), span)
    gradients, received = grown * staged.gradient_bytes, staged.work.held.received
    kept: set[int] = set()
    alive: list[float] = []
    for segment in segments:
        kept |= set(segment.takes)
        own = staged.work.held.peak_bytes(range(segment.first, segment.stop), gradients)
        own += float(received[span.start : segment.first].sum())
        later = float(gradients[segment.stop : span.stop].sum())
        alive.append(sum(sizes[index] for index in kept) + own + later)  # what lies behind is gone
    kept |= set(segments[-1].gives)  # what is sent stays until its gradient comes
    borders = float(sum(sizes[index] for index in kept) + received[span.start : span.stop].sum())
    return borders, max(max(alive) - borders, 0.0)
