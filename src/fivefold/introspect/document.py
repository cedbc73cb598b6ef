"""The report as plain data: what `fivefold report --json` prints and the page embeds. See `shape`."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.arrivals import Meeting, Meetings
from fivefold.introspect.charts import heat, outstanding, rank_table, series, timeline
from fivefold.introspect.efficiency import throughput
from fivefold.introspect.facts import calibrated, configuration, facts, marks
from fivefold.introspect.findings import as_data
from fivefold.introspect.helping import Helping
from fivefold.introspect.numbers import column, plain, rounded
from fivefold.introspect.run import FULL, TracedRun
from fivefold.introspect.shape import SHAPE, Document, Steady
from fivefold.introspect.steps import Floats, Steps
from fivefold.introspect.tables import Arrivals, Breakdown, Kind, LateOperation
from fivefold.introspect.verdict import findings, verdict
from fivefold.trace.schema import KINDS, PHASES, TAGS

__all__ = ["breakdown", "document", "made_by"]

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


# ---- Who waits for whom, and the operations that were waited for longest, as data

_BLOCKS = 64
"""most rows of the matrix"""
_LATE = 50


def arrivals(met: Meetings, origin_ns: int) -> Arrivals:
    """What a report says on arrivals. Where there are many ranks, neighbours share a row of the matrix."""
    size = len(met.ranks)
    starts = np.arange(0, size, -(-size // _BLOCKS))
    ends = np.append(starts[1:], size) - 1
    waited = np.add.reduceat(np.add.reduceat(met.waited_s, starts, axis=0), starts, axis=1)
    per_step = waited / max(1, met.steps) / (ends - starts + 1)[:, None]
    skew = np.concatenate([m.skew_ns for m in met.met]) / 1e9 if met.met else np.zeros(0)
    middle, high = column(np.quantile(skew, (0.5, 0.9))) if len(skew) else (None, None)
    return {
        "compared": met.compared, "first_step": met.first_step, "last_step": met.last_step,
        "skew_p50_s": middle, "skew_p90_s": high,
        "blocks": [[int(met.ranks[a]), int(met.ranks[b])] for a, b in zip(starts, ends, strict=True)],
        "waited_s": [column(row) for row in per_step],
        "late": _latest(met, origin_ns),
    }  # fmt: skip


def _latest(met: Meetings, origin_ns: int) -> list[LateOperation]:
    found: list[LateOperation] = []
    for meeting in met.met:
        widest = meeting.widest
        worst = widest[np.argsort(-meeting.skew_ns[widest], kind="stable")][:_LATE]
        found += [_late(meeting, int(i), origin_ns) for i in worst if meeting.skew_ns[i]]
    return sorted(found, key=lambda row: -row["skew_s"])[:_LATE]


def _late(meeting: Meeting, at: int, origin_ns: int) -> LateOperation:
    event, last = meeting.first[at], int(meeting.last[at])
    kind, tag, phase = int(event["kind"]), int(event["tag"]), int(meeting.phase[last, at])
    return plain({
        "group": meeting.group.name, "number": int(meeting.number[at]),
        "operation": KINDS[kind] if kind < len(KINDS) else "other",
        "tag": TAGS[tag] if tag < len(TAGS) else "untold", "step": int(event["step"]),
        "size_bytes": int(event["size_bytes"]), "skew_s": int(meeting.skew_ns[at]) / 1e9,
        "first": int(meeting.ranks[np.argmin(meeting.arrival_ns[:, at])]),
        "last": int(meeting.ranks[last]), "last_phase": PHASES[phase] if phase < len(PHASES) else None,
        "at_s": (int(meeting.arrival_ns[:, at].min()) - origin_ns) / 1e9,
    })  # fmt: skip


# ---- Where a steady step goes, and how long it takes


def steady(steps: Steps | None) -> Steady | None:
    """The steps after warm-up."""
    if steps is None:
        return None
    rows = np.flatnonzero(steps.steady)
    slowest = np.fmax.reduce(steps.wall, axis=0)[rows]
    p10, p50, p90 = np.nanquantile(slowest, (0.1, 0.5, 0.9))
    counts = steps.count.max(0)[rows]
    return {
        "first_step": int(steps.first_step[rows[0]]),
        "last_step": int(steps.first_step[rows[-1]] + counts[-1]) - 1,
        "steps": int(counts.sum()), "step_s": rounded(steps.step_s) or 0.0,
        "step_s_p10": rounded(p10) or 0.0, "step_s_p50": rounded(p50) or 0.0,
        "step_s_p90": rounded(p90) or 0.0,
    }  # fmt: skip


def breakdown(run: TracedRun, steps: Steps | None) -> list[Breakdown]:
    """Computing by phase, exposed communication by tag, and the rest; largest first."""
    if steps is None:
        return []
    computing, exposed = steps.mean(steps.computing), steps.mean(steps.exposed)
    total = float(np.nanmean(steps.mean(steps.wall))) or 1.0
    calls = _calls(run) / max(1, int(steps.count.max(0).sum()))
    asked, sizes = steps.mean(steps.operations), steps.mean(steps.bytes)
    found = [
        _part(steps, str(PHASES[i]), "phase", computing[:, i], total)
        for i in range(len(PHASES)) if np.nansum(computing[:, i]) > 0
    ]  # fmt: skip
    for i, tag in enumerate(TAGS):
        if np.nansum(asked[:, i]) > 0:
            row = _part(steps, str(tag), "exposed", exposed[:, i], total)
            hidden = np.maximum(asked[:, i] - exposed[:, i], 0.0)
            row["hidden_s"], row["bytes"] = _mean(hidden), _mean(sizes[:, i])
            row["calls"] = rounded(float(calls[i]))
            found.append(row)
    found.append(_part(steps, "other", "other", computing[:, len(PHASES)], total))
    return sorted(found, key=lambda row: -row["seconds"])


def _part(steps: Steps, part: str, kind: Kind, values: Floats, total: float) -> Breakdown:
    seconds = _mean(values) or 0.0
    most = int(np.nanargmax(values)) if not np.isnan(values).all() else 0
    return {
        "part": part, "kind": kind, "seconds": seconds,
        "share": rounded(seconds / total) or 0.0,
        "least_s": rounded(float(np.nanmin(values))) or 0.0,
        "most_s": rounded(float(values[most])) or 0.0, "most_rank": int(steps.ranks[most]),
        "hidden_s": None, "bytes": None, "calls": None,
    }  # fmt: skip


def _calls(run: TracedRun) -> Floats:
    """Operations of a rank by tag in the whole run, mean over ranks."""
    found = np.zeros(len(TAGS))
    for trace in run.ranks:
        sums = trace.sums[(trace.sums["kind"] > 0) & (trace.sums["tag"] < len(TAGS))]
        np.add.at(found, sums["tag"], sums["count"].astype(float))
    return found / len(run.ranks)


def _mean(values: Floats) -> float | None:
    return rounded(float(np.nanmean(values))) if not np.isnan(values).all() else None
