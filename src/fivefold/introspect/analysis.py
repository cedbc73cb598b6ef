"""What all rules look at: steps, arrivals and operations of a run, each worked out once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.arrivals import Meetings, meetings
from fivefold.introspect.groups import Group, groups
from fivefold.introspect.operations import operations
from fivefold.introspect.run import TracedRun
from fivefold.introspect.steps import Floats, Steps
from fivefold.introspect.tables import Operation
from fivefold.trace.schema import TAGS

__all__ = ["Analysis"]


@dataclass(frozen=True)
class Analysis:
    """A run and what can be read from it. Times in seconds per steady step."""

    run: TracedRun

    @cached_property
    def steps(self) -> Steps | None:
        """None: no step has ended."""
        return Steps.of(self.run)

    @cached_property
    def groups(self) -> dict[tuple[int, int], Group]:
        """By rank and number of the group there."""
        return groups(self.run)

    @cached_property
    def met(self) -> Meetings:
        """Arrivals in steady steps that are still in the rings."""
        first = int(self.steps.first_step[self.steps.steady][0]) if self.steps else 0
        return meetings(self.run, self.groups, first)

    @cached_property
    def operations(self) -> list[Operation]:
        """Communication added up."""
        return operations(self.run, self.groups, self.met)

    @property
    def sure_steps(self) -> Steps:
        """For rules that are asked only when there are steps."""
        assert self.steps is not None
        return self.steps

    @cached_property
    def work(self) -> Floats:
        """Ranks x steady rows: the step without exposed communication."""
        return self.sure_steps.work[:, self.sure_steps.steady]

    @cached_property
    def weight(self) -> NDArray[np.int64]:
        """Steps of each steady row."""
        return self.sure_steps.count.max(0)[self.sure_steps.steady]

    @cached_property
    def slowest(self) -> NDArray[np.int64]:
        """Of each steady row, the rank (its index) that works longest: the others wait for it."""
        return np.argmax(np.nan_to_num(self.work), axis=0)

    def host(self, rank: int) -> str:
        """Of a rank that was read."""
        found = (t.meta.get("host") for t in self.run.ranks if t.rank == rank)
        return str(next(found, None) or f"the node of rank {rank}")

    def on_critical(self, values: Floats) -> float:
        """Mean over steady steps of what the slowest rank has; `values` are ranks x all rows."""
        chosen = values[:, self.sure_steps.steady][self.slowest, np.arange(len(self.slowest))]
        return float(np.average(np.nan_to_num(chosen), weights=self.weight)) if len(chosen) else 0.0

    def exposed_in(self, rows: Iterable[tuple[Operation, float]]) -> float:
        """Exposed time of the slowest rank in some operations, each times a weight.

        Windows know it by tag: it is shared out as the sums of the whole run are.
        """
        total: dict[str, float] = defaultdict(float)
        chosen: dict[str, float] = defaultdict(float)
        for row in self.operations:
            total[row["tag"]] += row["exposed_s"]
        for row, weight in rows:
            chosen[row["tag"]] += weight * row["exposed_s"]
        exposed = self.sure_steps.exposed
        return sum(
            chosen[str(tag)] / total[str(tag)] * self.on_critical(exposed[..., number])
            for number, tag in enumerate(TAGS) if chosen[str(tag)] > 0
        )  # fmt: skip

    def gain_s(self, work: Floats) -> float:
        """What steps could become shorter if ranks worked as long as `work` (ranks x steady rows) says.

        An upper bound: the rank that works longest sets the pace, and nothing else may get in the way.
        """
        now, then = np.nan_to_num(self.work).max(0), np.nan_to_num(work).max(0)
        gain = np.maximum(now - then, 0.0)
        return float(np.average(gain, weights=self.weight)) if len(gain) else 0.0
