"""What of waiting is for ranks that come late, and what is the transfer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.run import TracedRun
from fivefold.introspect.tables import Operation
from traces import MS, Story

REDUCE = 1
"""of the two sums of a step, the one that is waited for: 4 ms from when all have come"""


def run_of(tmp_path: Path) -> TracedRun:
    """Two ranks, of which the second asks 12 ms later, or a little less or more."""
    return TracedRun.load(Story(ranks=2, steps=20).slow_loader(1).write(tmp_path))


def sums(run: TracedRun) -> list[np.ndarray]:
    """Of each rank, where the waited for sums are among its events."""
    return [(t.events["kind"] > 0) & (t.events["number"] % 2 == REDUCE) for t in run.ranks]


def asked(run: TracedRun) -> np.ndarray:
    """By rank and step."""
    return np.stack([t.events["begin_ns"][at] for t, at in zip(run.ranks, sums(run), strict=True)])


def transfers(run: TracedRun) -> np.ndarray:
    """Of the waited for sums, seconds."""
    (meeting,) = Analysis(run).met.met
    return meeting.served_ns[meeting.number % 2 == REDUCE] / 1e9


def row_of(run: TracedRun) -> Operation:
    (row,) = Analysis(run).operations
    return row


def test_waiting_lasts_until_the_last_one_asks_and_the_rest_is_the_transfer(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    late = (asked(run)[1] - asked(run)[0])[1:] / 1e9
    row = row_of(run)
    share = late.sum() / (late.sum() + 2 * len(late) * 4e-3)
    assert row["waiting_s"] == pytest.approx(share * row["exposed_s"])
    np.testing.assert_allclose(transfers(run), 4e-3)


@pytest.mark.parametrize("offset_ns", [0, 5 * 10**11, -5 * 10**11])
def test_told_when_all_had_come_the_transfer_is_from_then_on(
    offset_ns: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    start, late = asked(run).max(0) + MS, (asked(run)[1] - asked(run)[0])[1:] / 1e9
    for trace, at in zip(run.ranks, sums(run), strict=True):
        trace.events["start_ns"][at] = start
        for name in ("begin_ns", "end_ns", "start_ns"):
            trace.events[name][at] -= offset_ns
        trace.meta["clock_offset_ns"] = offset_ns
    row = row_of(run)
    share = (late + 2e-3).sum() / (late.sum() + 2 * len(late) * 4e-3)
    assert row["waiting_s"] == pytest.approx(share * row["exposed_s"])
    np.testing.assert_allclose(transfers(run), 3e-3)
    waited = Analysis(run).met.waited_s
    assert waited[0, 1] == pytest.approx(late.sum()), "the last millisecond is nobody's fault"


def test_a_moment_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    expected = row_of(run)
    for trace, at in zip(run.ranks, sums(run), strict=True):
        trace.events["start_ns"][at] = 17
    assert row_of(run) == expected


def test_who_computed_until_the_transfer_had_begun_waited_for_nobody(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    at = sums(run)[0]
    run.ranks[0].events["blocked_ns"][at] = 3 * MS  # of 4 from when all had come
    analysis = Analysis(run)
    assert analysis.met.waited_s.sum() == 0
    assert analysis.operations[0]["waiting_s"] == 0
    run.ranks[0].events["blocked_ns"][at] = 5 * MS
    assert Analysis(run).met.waited_s[0, 1] == pytest.approx(19 * 1e-3)
