"""Under a memory budget: random choices of what is kept, computed again and spilled.

Each rank draws its own, anew for each kind of batch.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from fivefold.parallel.memory import saving, step
from fivefold.parallel.memory.choice import Choice, NodeSpan

__all__ = ["at_random"]


def at_random(seed: int) -> None:
    """From here on, in this process."""
    saving.LEAST_BYTES = 1

    def choose(self: step.StepBudget, decision: step.Decision, _: Any) -> None:
        decision.due, nodes = False, len(decision.profile.nodes)
        rng = random.Random(f"{seed} {self.rank} {decision.steps} {nodes}")
        decision.choice = drawn(rng, nodes)
        decision.pool = self.pool(rng.choice([0, 64, 4096]))

    step.StepBudget.choose = choose


def drawn(rng: random.Random, nodes: int) -> Choice:
    """Spans of nodes, and of what is kept in them some that is spilled."""
    cuts = sorted({0, nodes, *(rng.randrange(nodes + 1) for _ in range(rng.randrange(8)))})
    again = rng.choice([0.0, 0.5, 1.0])
    spans = [NodeSpan(a, b, rng.random() < again) for a, b in itertools.pairwise(cuts)]
    values = [("value", index, 0) for index in range(4 * nodes)]
    within = [("within", node, number) for node in range(nodes) for number in range(8)]
    part = rng.choice([0.0, 0.5, 1.0])
    return Choice(tuple(spans), frozenset(k for k in (*values, *within) if rng.random() < part))
