"""The report as plain data: what `fivefold report --json` prints and the page embeds. See `shape`."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.breakdown import breakdown, steady
from fivefold.introspect.charts import heat, outstanding, rank_table, series, timeline
from fivefold.introspect.efficiency import throughput
from fivefold.introspect.facts import calibrated, configuration, facts, marks
from fivefold.introspect.findings import as_data
from fivefold.introspect.helping import Helping
from fivefold.introspect.matrix import arrivals
from fivefold.introspect.numbers import plain
from fivefold.introspect.run import FULL, TracedRun
from fivefold.introspect.shape import SHAPE, Document
from fivefold.introspect.steps import Steps
from fivefold.introspect.verdict import findings, verdict

__all__ = ["document", "made_by"]

_STACKS = 20
"""places per phase"""
_VALUES = 20_000
"""of one column of the timeline, all ranks that are told in full together"""


def document(run: TracedRun) -> Document:
    """Everything that a report says about a run, as data for `json.dumps`."""
    analysis = Analysis(run)
    steps, met = analysis.steps, analysis.met
    chosen = outstanding(run, steps, met)
    found = findings(analysis)
    most = 500 if len(run.ranks) <= FULL else 300
    rows = max(50, min(most, _VALUES // max(1, len(chosen))))
    drawn = steps if steps is None or len(steps.first_step) <= rows else Steps.of(run, rows)
    made: Any = {
        "shape": SHAPE, "kind": "run", **made_by(), "run": facts(run, steps, analysis.groups),
        "problems": list(run.problems),
        "verdict": verdict(analysis, found), "findings": [as_data(finding) for finding in found],
        "steady": steady(steps), "breakdown": breakdown(run, steps),
        "timeline": timeline(drawn, chosen), "heat": heat(drawn),
        "ranks": rank_table(run, steps, met, chosen),
        "operations": plain(analysis.operations), "arrivals": arrivals(met, steps.origin_ns if steps else 0),
        "series": series(run, drawn), "marks": marks(run, steps),
        "throughput": throughput(run, steps), "offload": Helping(run).table(),
        "calibration": calibrated(run),
        "configuration": configuration(run), "stacks": _stacks(run, chosen),
    }  # fmt: skip
    return cast("Document", made)


def made_by() -> Any:
    """Version and time of the report."""
    try:
        ours = version("fivefold")
    except PackageNotFoundError:
        ours = "unknown"
    return {"fivefold": ours, "made": datetime.now(UTC).isoformat(timespec="seconds")}


def _stacks(run: TracedRun, chosen: list[int]) -> dict[str, dict[str, list[list[Any]]]]:
    """Of the chosen ranks, and of all together."""
    found: dict[str, dict[str, list[list[Any]]]] = {}
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for trace in run.ranks:
        for phase, places in trace.stacks.items():
            total[phase].update(dict(places))
        if trace.rank in chosen and trace.stacks:
            found[str(trace.rank)] = {
                phase: [list(place) for place in places[:_STACKS]]
                for phase, places in trace.stacks.items()
            }
    if total:
        found["all"] = {p: [list(x) for x in c.most_common(_STACKS)] for p, c in total.items()}
    return cast("dict[str, dict[str, list[list[Any]]]]", plain(found))
