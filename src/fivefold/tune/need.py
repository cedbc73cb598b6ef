"""How much memory a candidate needs, predicted.

    parameters, gradients, their buckets, the optimiser's numbers
    + the samples
    + what micro-batches keep for backward, as many as the schedule has alive
    + the most beside it while one of them is differentiated

Under a budget it is the budget, where some choice of what is computed again holds no more, see `budget`.
Replicas that divide parameters hold parts of them, and within a step whole ones: all, or those at work.

Not counted: workspaces of kernels, what an allocator wastes, torch itself.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.parallel.pipeline.schedule import Op, Schedule
from fivefold.parallel.pipeline.simulate import ScheduleTimes
from fivefold.parallel.program.recompute import divided
from fivefold.parallel.program.run import returned
from fivefold.tune.budget import Level, levels, returned_bytes
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
    units_bytes: tuple[int, int] = (0, 0)
    """see `Subject`; for parameters that are gathered layer by layer"""

    def most_bytes(self, schedule: Schedule) -> int:
        """Of the rank that needs most; what a budget would do is left out."""
        makes = self._alive_bytes(schedule, *self.activations())
        return max(size + self.standing_bytes(schedule, rank) for rank, size in enumerate(makes))

    def within(self, schedule: Schedule, budget_bytes: int) -> tuple[int, list[float]]:
        """Bytes of the rank that needs most under a budget, and what stages compute again for a micro-batch.

        The bytes are the budget, of which runs use all that they can; or more, if that is the least. Ranks
        choose for themselves. The seconds, by stage, are those of the rank that computes most again.
        """
        alive = _alive(schedule)
        gathers = self._grows and (self._sums or schedule.stages > 1)
        choices = [
            levels(self.staged, stage, self.rows, most, gathers=gathers)
            for stage, most in enumerate(alive)
        ]
        table = [
            self._alive_bytes(schedule, *self._with_messages(c)) for c in zip(*choices, strict=True)
        ]
        need, again_s = budget_bytes, [0.0] * schedule.stages
        for rank, makes in enumerate(zip(*table, strict=True)):
            standing = self.standing_bytes(schedule, rank)
            fit = (n for n, size in enumerate(makes) if standing + size <= budget_bytes)
            number = next(fit, makes.index(min(makes)))
            need = max(need, standing + makes[number])
            for stage in schedule.stages_of(rank):
                again_s[stage] = max(again_s[stage], choices[stage][number].again_s)
        return need, again_s

    def _with_messages(self, chosen: Sequence[Level]) -> tuple[list[int], list[int]]:
        """As `activations`, by stage."""
        beside = (
            level.beside + self.rows * self._under_way(stage) for stage, level in enumerate(chosen)
        )
        return [round(level.saved) for level in chosen], [round(size) for size in beside]

    def _alive_bytes(
        self, schedule: Schedule, saved: Sequence[int], beside: Sequence[int]
    ) -> list[int]:
        """The most of each rank, if stages keep so much for a micro-batch, and so much is beside it."""
        # Messages have left when later ones prove it: about when their gradients arrive.
        sent = [round(self.rows * size) for size in self.staged.packed_bytes]
        with_sent = [own + copies for own, copies in zip(saved, sent, strict=True)]
        timeline = ScheduleTimes(schedule, {})
        alive, leaving = timeline.peak_bytes(saved), timeline.peak_bytes(with_sent)
        most = [0] * schedule.ranks
        for chain, stage in itertools.product(range(schedule.chains), range(schedule.stages)):
            rank = schedule.rank_of(chain, stage)
            most[rank] = max(most[rank], beside[stage])
        return [max(alive[r] + most[r], leaving[r]) for r in range(schedule.ranks)]

    def standing_bytes(self, schedule: Schedule, rank: int) -> int:
        """What is there before a step: parameters and what goes with them, and the samples.

        Under a budget there are gradients of the step before, which a script may leave, two numbers of the
        optimiser, until its first step shows what it keeps, and targets, taken to be as many as outputs.
        """
        stages, staged, chosen = schedule.stages_of(rank), self.staged, self.candidate
        budgeted, trained = bool(chosen.budget), sum(staged.trained_bytes[s] for s in stages)
        held = sum(staged.parameter_bytes[s] for s in stages)
        copies = max(self.copies, 2) if budgeted else self.copies
        earlier = not self._grows or (budgeted and chosen.layout.pipe == 1)
        standing = held + (earlier + self._sums + copies) * trained
        if chosen.parts > 1:  # of parameters and gradients as well, within a step beside whole ones
            own = -(-trained // chosen.parts)
            standing = held + (not self._grows) * trained + (2 + copies) * own
        if chosen.shard == "parameters" and chosen.parts > 1:
            largest, rest = self.units_bytes
            standing += 2 * (2 * largest + rest) - trained  # and their gradients on their way
        standing += round(staged.takes_bytes[0] * self.samples) if 0 in stages else 0
        if budgeted and schedule.stages - 1 in stages:
            standing += round(returned_bytes(staged) * self.samples)
        return standing

    @property
    def _sums(self) -> bool:
        """Whether gradients are summed over ranks."""
        return self.candidate.reducers > 1

    @property
    def _grows(self) -> bool:
        """Whether gradients come while activations go: with several micro-batches they soon are all there."""
        return self.candidate.micro_batches == 1 and self.candidate.stages_per_rank == 1

    def activations(self) -> tuple[list[int], list[int]]:
        """By stage: what a micro-batch keeps, and the most beside it while it is differentiated."""
        staged, told = self.staged, self.candidate.recompute
        each = max(round(told / self.candidate.stages), 1) if told else 0
        stays = self._grows and self.candidate.shard != "parameters"
        saved: list[int] = []
        beside: list[int] = []
        for stage, span in enumerate(staged.spans):
            scale = self.rows / staged.work.rows
            grown = 1 / scale if stays else 0.0
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


def _alive(schedule: Schedule) -> list[int]:
    """By stage: how many micro-batches keep something at once, on the rank where most do."""
    most = [0] * schedule.stages
    for row in schedule.rows:
        now = Counter[int]()
        for action in row:
            if action.op is Op.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.op in (Op.BACKWARD, Op.WEIGHT):
                now[action.stage] -= 1
    return most


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
