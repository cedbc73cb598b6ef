"""One case: judged in one process, run under its layout, compared."""

from __future__ import annotations

from typing import Any, Self

from fuzz.cases import Case, coarse, ranks_of
from fuzz.compare import Outcome, judged, largest, sensitivity
from fuzz.judge import Judge, Rejected
from fuzz.pool import Ranks

__all__ = ["Runner", "checked"]

SHAKY, SHAKY_LOW = 1e-9, 2.0
"""a case whose numbers react more than this to one ulp says nothing about exactness; with regions of low
precision, more than so many times what these may cause, to a twentieth of that"""
DIVERGED = 1e12
"""a softmax of such numbers is a choice, which any rounding turns"""


def checked(judge: Judge, case: Case) -> dict[str, Any]:
    """The truth about a case. Raises `Rejected` for one that is not valid in one process, or shaky there."""
    truth = judge.of(case)
    reaction = sensitivity(truth)
    if not reaction <= (SHAKY_LOW * coarse(case) or SHAKY):
        raise Rejected("Shaky", "one process", f"rounding moves a result by {reaction:.1e}")
    if largest(truth) > DIVERGED:
        raise Rejected("Shaky", "one process", "training diverges")
    if low := coarse(case):
        moved = sensitivity({**truth, "nudged": judge.by_rows(case)})
        if not moved <= low / 2:
            text = f"rounding by samples moves a result by {moved:.1e}"
            raise Rejected("Shaky", "one process", text)
    if ranks_of(case) == 1 and any(step["uncontrolled"] for step in truth["steps"]):
        raise Rejected("Random", "one process", "numbers that no layout controls follow its masks")
    return truth


class Runner:
    """A judge and ranks that stay."""

    def __init__(self, limit_s: float = 20.0) -> None:
        self.judge, self.ranks = Judge(), Ranks(limit_s)

    def run(self, case: Case, truth: dict[str, Any] | None = None, fault: str = "") -> Outcome:
        """The outcome of a case. Raises `Rejected`."""
        truth = truth or checked(self.judge, case)
        return judged(case, truth, self.ranks.run(case, fault))

    def tried(self, case: Case) -> Outcome | None:
        """The outcome of a case; None for one that is not valid."""
        try:
            return self.run(case)
        except Rejected:
            return None

    def close(self) -> None:
        self.judge.close()
        self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
