"""What steps came to, over all ranks: what a run tells while it trains, and exports of its trace tell later.

what          over ranks
step_s        the slowest
loss          one number of the whole batch, no mean of ranks
phases_s      mean
exposed_s     mean; operations that a rank could do nothing beside, by what they are for
memory        the largest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["StepFigures"]


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step, or means over several. None, or nothing, is what nobody knows."""

    step: int
    """the last one, from 1"""
    steps: int = 1
    """how many: this one and those before it"""
    loss: float | None = None
    """of the whole batch; over several steps the mean over their samples"""
    step_s: float | None = None
    """seconds from step to step"""
    samples_per_s: float | None = None
    """different samples, of all ranks together"""
    phases_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """seconds of a step by `Phase`"""
    exposed_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """seconds of a step in which ranks waited for communication, by `Tag`; where a trace is written"""
    exposed_share: float | None = None
    """of the time of all ranks, what was spent so"""
    late_rank: int | None = None
    """who worked longest, waiting not counted; where a trace is written"""
    late_s: float | None = None
    """how much longer than the median of the ranks, per step"""
    rss_bytes: int | None = None
    """main memory of a process"""
    gpu_bytes: int | None = None
    """most that tensors took on a GPU since training began"""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """what the script added"""

    def scalars(self) -> dict[str, float]:
        """All that is known, by the names under which charts have it."""
        named = {
            "loss": self.loss,
            "step/seconds": self.step_s,
            "step/samples_per_second": self.samples_per_s,
            **{f"phase/{phase}": seconds for phase, seconds in self.phases_s.items()},
            **{f"exposed/{tag}": seconds for tag, seconds in self.exposed_s.items()},
            "step/exposed_share": self.exposed_share,
            "step/late_rank": self.late_rank,
            "step/late_seconds": self.late_s,
            "memory/bytes": self.rss_bytes,
            "memory/gpu_bytes": self.gpu_bytes,
            **self.values,
        }
        return {name: float(value) for name, value in named.items() if value is not None}
