"""Where a steady step goes, and how long it takes."""

from __future__ import annotations

import numpy as np

from fivefold.introspect.numbers import rounded
from fivefold.introspect.run import TracedRun
from fivefold.introspect.shape import Steady
from fivefold.introspect.steps import Floats, Steps
from fivefold.introspect.tables import Breakdown, Kind
from fivefold.trace.schema import PHASES, TAGS

__all__ = ["breakdown", "steady"]


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
