"""When a run saves."""

from __future__ import annotations

import pytest

from fivefold.checkpoint.rhythm import Rhythm


def test_steps_decide_where_they_are_given() -> None:
    rhythm = Rhythm(every=3, mtbf_s=60, max_overhead=0.01)
    assert [step for step in range(1, 10) if rhythm.by_step(step)] == [3, 6, 9]
    assert not rhythm.by_time()
    assert not Rhythm(every=0, mtbf_s=60, max_overhead=0).by_step(3)


def test_the_interval_follows_what_saves_cost() -> None:
    rhythm = Rhythm(every=0, mtbf_s=3600, max_overhead=0)
    for cost_s in (2.0, 2.0, 50.0):  # one slow save does not count
        rhythm.measured(cost_s)
    assert rhythm.interval_s == pytest.approx((2 * 2.0 * 3600) ** 0.5, rel=0.05)
    for _ in range(9):
        rhythm.measured(8.0)
    assert rhythm.interval_s == pytest.approx((2 * 8.0 * 3600) ** 0.5, rel=0.05)


def test_saving_lengthens_training_by_no_more_than_allowed() -> None:
    rhythm = Rhythm(every=0, mtbf_s=60, max_overhead=0.01)
    rhythm.measured(3.0)
    assert rhythm.interval_s >= 3.0 / 0.01 * 0.98


def test_it_is_not_time_right_after_a_save_however_little_it_costs() -> None:
    rhythm = Rhythm(every=0, mtbf_s=3600, max_overhead=0)
    rhythm.measured(0.0)
    rhythm.saved()
    assert not rhythm.by_time()
    assert 0 < rhythm.interval_s < 1


def test_flushes_are_shared_by_the_saves_between_them() -> None:
    rhythm = Rhythm(every=0, mtbf_s=3600, max_overhead=0, flush_every=10)
    rhythm.measured(0.5)
    assert rhythm.interval_s == pytest.approx((2 * 0.5 * 3600) ** 0.5, rel=0.05)
    for cost_s in (5.0, 5.0, 90.0):
        rhythm.flushed(cost_s)
    assert rhythm.flush_s == 5.0
    assert rhythm.interval_s == pytest.approx((2 * (0.5 + 5.0 / 10) * 3600) ** 0.5, rel=0.05)
    capped = Rhythm(every=0, mtbf_s=60, max_overhead=0.01, flush_every=10)
    capped.measured(0.5)
    capped.flushed(5.0)
    assert capped.interval_s == pytest.approx((0.5 + 0.5) / 0.01)
