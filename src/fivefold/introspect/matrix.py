"""Who waits for whom, and the operations that were waited for longest, as data."""

from __future__ import annotations

import numpy as np

from fivefold.introspect.arrivals import Meeting, Meetings
from fivefold.introspect.numbers import column, plain
from fivefold.introspect.tables import Arrivals, LateOperation
from fivefold.trace.schema import KINDS, PHASES, TAGS

__all__ = ["arrivals"]

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
