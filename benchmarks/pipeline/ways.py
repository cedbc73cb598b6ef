"""How each contender divides a batch of several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCHEDULES = (
    "layer",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "gems",
    "gems-overlap",
    "chimera",
)
"""all that Fivefold has"""


@dataclass(frozen=True)
class Way:
    """How Fivefold divides a batch of several micro-batches."""

    layout: Mapping[str, int]
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: str = "none"
    fuse: str = "auto"
    backend: str = "gloo"

    @property
    def by_itself(self) -> bool:
        """Whether every micro-batch is a step of its own; their gradients accumulate."""
        return "pipe" not in self.layout or self.schedule == "layer"


WAYS: Mapping[str, Way] = {
    **{f"{name}-2": Way({"pipe": 2}, name) for name in ("layer", "gpipe", "1f1b")},
    **{
        f"{name}-2-shared": Way({"pipe": 2}, name, backend="fivefold") for name in ("gpipe", "1f1b")
    },
    **{
        f"{name}-4": Way({"pipe": 4}, name, 2 if name == "interleaved" else 1) for name in SCHEDULES
    },
    "1f1b-recompute-4": Way({"pipe": 4}, "1f1b", recompute="all"),
    "tiles": Way({"width": 2}),
    "tiles-shared": Way({"width": 2}, backend="fivefold"),
    "tiles-never": Way({"width": 2}, fuse="never"),
}


def ranks_of(way: Way) -> int:
    """Of a layout of one axis."""
    (size,) = way.layout.values()
    return size


TORCH_SCHEDULES = {"torch-gpipe": "ScheduleGPipe", "torch-1f1b": "Schedule1F1B"}
STAGES = ("stages-2", "stages-4")
"""measure how long stages take"""
COUNT_MEMORY = 0
"""what a contender is told instead of a number of steps"""
