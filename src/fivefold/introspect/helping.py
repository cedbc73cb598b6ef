"""Helpers: what each did, who waits for whom, and what that says about their number.

the loop asks, none is ready   ──► trainers wait for helpers        supply: waited_s, occupancy near 0
a helper has no lease          ──► helpers wait for trainers        helper: waited_share
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.findings import Finding, evidence
from fivefold.introspect.numbers import plain, rounded, seconds_text, share_text
from fivefold.introspect.run import TracedRun
from fivefold.introspect.tables import Helper, Offload, Supply
from fivefold.trace.helping import STATES, HelperFigures, SupplyFigures, read
from fivefold.trace.phases import Phase
from fivefold.trace.schema import PHASES

__all__ = ["HELPING_RULES", "Helping", "gone", "idle", "short", "twice"]

_WORTH = 0.05
"""share of a step that the loop waits for helpers, from which that is told"""
_BUSY, _IDLE = 0.75, 0.35
"""share of its time that a helper computes: from the first it has no more to give, below the second it has
little to do"""
_TWICE, _LEAST = 0.1, 20
"""share of answers that came twice, and how many leases tell anything"""
_GONE = ("lost", "retired", "refused")
_WORST = {state: place for place, state in enumerate(("ended", "serving", "absent", *_GONE))}
assert set(_WORST) == set(STATES)


@dataclass(frozen=True)
class Helping:
    """What all trainers of a run say about its helpers."""

    run: TracedRun

    @cached_property
    def told(self) -> list[tuple[int, list[HelperFigures], SupplyFigures]]:
        """Rank of a trainer, and what its trace says; those without helpers are left out."""
        found = ((trace.rank, *read(trace.meta)) for trace in self.run.ranks)
        return [
            (rank, helpers, supply or SupplyFigures())
            for rank, helpers, supply in found
            if helpers or supply is not None
        ]

    @cached_property
    def helpers(self) -> list[Helper]:
        """By number; figures of several trainers put together."""
        by_number: dict[int, dict[int, HelperFigures]] = {}
        for rank, helpers, _ in self.told:
            for one in helpers:
                by_number.setdefault(one.number, {})[rank] = one
        return [_row(number, by_number[number]) for number in sorted(by_number)]

    @cached_property
    def supply(self) -> list[Supply]:
        """By rank."""
        return [_supply(rank, supply) for rank, _, supply in self.told]

    def table(self) -> Offload:
        """For the document."""
        return {"helpers": self.helpers, "supply": self.supply}

    @property
    def busy(self) -> float | None:
        """Mean share of time that helpers which served computed; None if none did."""
        shares = [row["busy_share"] for row in self.helpers if row["busy_share"] is not None]
        return sum(shares) / len(shares) if shares else None


def _row(number: int, told: dict[int, HelperFigures]) -> Helper:
    figures = list(told.values())
    # All trainers see the same time pass, so the longest counts; what it did for each adds up.
    connected = max(f.connected_s for f in figures)
    worst = max(figures, key=lambda f: _WORST.get(f.state, 0))

    def total(name: str) -> Any:
        return sum(getattr(f, name) for f in figures)

    def share(name: str) -> float | None:
        return rounded(min(1.0, total(name) / connected)) if connected > 0 else None

    return {
        "number": number, "name": worst.name, "state": worst.state, "why": worst.why,
        "trainers": sorted(rank for rank, f in told.items() if f.connected_s > 0),
        "connected_s": rounded(connected) or 0.0,
        "busy_share": share("busy_s"), "waited_share": share("waited_s"),
        "leases": total("leases"), "evaluated": total("evaluated"), "duplicates": total("duplicates"),
        "lost": total("lost"), "failed": total("failed"), "bytes": total("bytes"),
    }  # fmt: skip


def _supply(rank: int, told: SupplyFigures) -> Supply:
    batches = told.batches
    return {
        "rank": rank, "batches": batches, "own": told.own,
        "empty_share": rounded(told.empty / batches) if batches else None,
        "waited_s": rounded(told.waited_s / batches) if batches else None,
        "occupancy": plain(told.occupancy), "depth": plain(told.depth),
    }  # fmt: skip


# --- rules ----------------------------------------------------------------------------------------


def short(analysis: Analysis) -> Iterator[Finding]:
    """The loop waits for helpers: there are too few of them, or what they make comes too slowly."""
    helping, steps = Helping(analysis.run), analysis.steps
    waits = [row["waited_s"] or 0.0 for row in helping.supply]
    helped = sum(row["batches"] - row["own"] for row in helping.supply)
    if steps is None or not helped or helping.busy is None:
        return  # or they evaluate only
    loading = np.nan_to_num(steps.mean(steps.computing[..., PHASES.index(Phase.LOAD)]))
    slowest = float(loading.max())  # what the trainer makes itself while it waits is in it
    if slowest < _WORTH * steps.step_s:
        return
    gain = analysis.gain_s(
        analysis.work - steps.computing[..., PHASES.index(Phase.LOAD)][:, steps.steady]
    )
    busy, own = helping.busy, sum(row["own"] for row in helping.supply)
    share, serving = slowest / steps.step_s, _serving(helping)
    said = (
        f"loading takes {share_text(share)} of the step in spite of helpers, which are busy "
        f"{share_text(busy)} of the time"
    )
    yield Finding(
        "helpers-short", said, _more(busy, share, serving), share, (), gain,
        (evidence("offload", f"{seconds_text(slowest)} per step in load; {own:,} of "
                  f"{sum(row['batches'] for row in helping.supply):,} batches the trainers made themselves"),
         evidence("timeline", "load of each step", phase="load")),
        {"load_s": slowest, "busy_share": busy, "helpers": serving, "own": own,
         "waited_s": max(waits)},
    )  # fmt: skip


def _more(busy: float, share: float, serving: int) -> str:
    """What to do about a loop that waits."""
    if busy >= _BUSY:
        # Together they make as many batches as steps take; without the wait, steps would take that much less.
        wanted = max(serving + 1, math.ceil(serving / max(1.0 - share, 0.1)))
        return f"add helpers: {wanted} instead of {serving} would keep up, if they are alike"
    return (
        "helpers have time left, so more of them would not help: look at the link to them, at what they "
        "read from, and let them be farther ahead (offload.prefetch_bytes)"
    )


def idle(analysis: Analysis) -> Iterator[Finding]:
    """Helpers wait for trainers most of the time."""
    helping = Helping(analysis.run)
    busy, serving = helping.busy, _serving(helping)
    leases = sum(row["leases"] for row in helping.helpers)
    if busy is None or busy >= _IDLE or leases < _LEAST or any(short(analysis)):
        return
    fewer = max(1, math.ceil(serving * busy / _BUSY))
    evaluated = sum(row["evaluated"] for row in helping.helpers)
    spare = [] if evaluated else ["give them validation (offload.validation, ff.Validator)"]
    spare += [f"take {fewer} instead of {serving}"] if fewer < serving else []
    yield Finding(
        "helpers-idle", f"helpers are idle {share_text(1 - busy)} of the time",
        " or ".join(spare) or "nothing: one helper is the fewest, and it keeps up easily",
        evidence=(evidence("offload", f"{serving} helpers, {leases:,} leases",
                           rows=range(len(helping.helpers))),),
        figures={"busy_share": busy, "helpers": serving, "enough": fewer, "evaluated": evaluated},
    )  # fmt: skip


def gone(analysis: Analysis) -> Iterator[Finding]:
    """Helpers that were lost, told to stop, or could not serve."""
    rows = [
        (at, row) for at, row in enumerate(Helping(analysis.run).helpers) if row["state"] in _GONE
    ]
    if not rows:
        return
    first = rows[0][1]
    why = f": {first['why']}" if first["why"] else ""
    others = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    what = {"lost": "was lost", "retired": "delayed more than it helped and was told to stop",
            "refused": "could not serve"}[first["state"]]  # fmt: skip
    advice = {
        "lost": "its log says how it ended; batches were made elsewhere, none is missing",
        "retired": "see whether its cores are its own, and whether its link is as fast as it should be",
        "refused": "see that it finds the same data set and script as the trainers",
    }[first["state"]]
    yield Finding(
        "helper-gone", f"{first['name']} {what}{why}{others}", advice,
        evidence=(evidence("offload", "its row", rows=[at for at, _ in rows]),
                  evidence("marks", "when that was")),
        figures={"helpers": [row["number"] for _, row in rows], "state": first["state"]},
    )  # fmt: skip


def twice(analysis: Analysis) -> Iterator[Finding]:
    """Much work was done twice: leases of helpers that stalled were given to others as well."""
    rows = Helping(analysis.run).helpers
    leases, doubles = sum(row["leases"] for row in rows), sum(row["duplicates"] for row in rows)
    if leases < _LEAST or doubles < _TWICE * leases:
        return
    worst = max(range(len(rows)), key=lambda at: rows[at]["duplicates"])
    yield Finding(
        "helpers-twice", f"{share_text(doubles / leases)} of what helpers made had been made already",
        f"{rows[worst]['name']} answers late: see what stops it from time to time (other jobs on its cores, "
        "a slow file system), or leave it out",
        evidence=(evidence("offload", f"{doubles:,} duplicates beside {leases:,} leases", rows=[worst]),),
        figures={"duplicates": doubles, "leases": leases, "helper": rows[worst]["number"]},
    )  # fmt: skip


def _serving(helping: Helping) -> int:
    return sum(row["state"] not in ("absent", "refused", "retired") for row in helping.helpers)


HELPING_RULES: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (short, idle, gone, twice)
"""rules about helpers"""
