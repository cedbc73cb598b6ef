"""What a checkpoint costs, out of a block of steps without one and a block with one.

    block without     |step|step|step|                 its wall and processor time, per step
    block with one    |step|save, step|step ...|rest|  beyond as many such steps: stall and CPU

Helpers that take cores from training make its steps longer: what they use is in the stall already. Where
cores were idle it is not, and the processor time tells. The larger of both is the overhead; their sum would
count the same seconds twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FIXED_S", "MTBF_S", "Cost", "Rounds", "call_s", "costs", "mixed", "of_blocks"]

FIXED_S, MTBF_S = 60.0, 3600.0
EVERY = 10
"""of so many saves, one is flushed"""

Rounds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint, in seconds; below 0 where noise is larger."""

    stall_s: float
    """wall time beyond that of as many steps: the call, slower steps after it, what was left at the end"""
    cpu_s: float
    """processor time beyond that of as many steps, of all processes, helpers included"""
    cores: int

    @property
    def processor_s(self) -> float:
        """How long all cores would compute for it alone."""
        return self.cpu_s / self.cores

    @property
    def whole_s(self) -> float:
        """By the clock or by the processor, whichever is more."""
        return max(self.stall_s, self.processor_s, 0.0)

    def interval_s(self) -> float:
        """Young's, sqrt(2 x cost x MTBF) (CACM 17, 1974); 0 where no cost can be seen."""
        return math.sqrt(2 * self.whole_s * MTBF_S)

    def at_best(self) -> float:
        """Share of the time that checkpoints take at Young's interval."""
        return math.sqrt(self.whole_s / (2 * MTBF_S))


def of_blocks(blocks: Mapping[str, Any], cores: int) -> Cost:
    """Of one round. A step's own time is the mean of those in the block before, which had no save.

    Wall time begins after the step that opens a block, processor time before it.
    """
    quiet, saved = blocks["quiet"], blocks["saved"]
    steps, quiet_steps = len(saved["step_s"]), len(quiet["step_s"])
    return Cost(
        saved["wall_s"] - quiet["wall_s"] * steps / quiet_steps,
        saved["cpu_s"] - quiet["cpu_s"] * (steps + 1) / (quiet_steps + 1),
        cores,
    )


def costs(blocks: Mapping[str, Rounds], cores: int) -> dict[str, list[Cost]]:
    """By contender and round; "xor-tenth" is computed where there is all that it needs."""
    found = {name: [of_blocks(b, cores) for b in rounds] for name, rounds in blocks.items()}
    if "xor" in found and "xor-flushed" in found:
        pairs = zip(found["xor"], found["xor-flushed"], strict=True)
        found["xor-tenth"] = [mixed(kept, flushed) for kept, flushed in pairs]
    return found


def mixed(kept: Cost, flushed: Cost) -> Cost:
    """The mean where every tenth checkpoint is flushed."""
    share = 1 / EVERY
    return Cost(
        (1 - share) * kept.stall_s + share * flushed.stall_s,
        (1 - share) * kept.cpu_s + share * flushed.cpu_s,
        kept.cores,
    )


def call_s(rounds: Rounds) -> float:
    """What training sees at once."""
    return statistics.median(b["saved"]["call_s"] for b in rounds)
