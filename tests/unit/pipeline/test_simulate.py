"""Times and memory of schedules, against what is published and what can be counted by hand.

S stages on as many ranks, M micro-batches; F takes f, B takes b, and f = 1, b = 2 where nothing else is said.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import PlanError
from fivefold.parallel.pipeline.schedule import Action, Schedule
from fivefold.parallel.pipeline.schedules import SCHEDULES, make
from fivefold.parallel.pipeline.simulate import ScheduleTimes, StageTimes, simulate

ranks = st.integers(1, 7)
many = st.integers(1, 12)


def timed(schedule: Schedule, forward_s: float = 1, backward_s: float = 2) -> ScheduleTimes:
    return simulate(schedule, StageTimes.even(schedule.stages, forward_s, backward_s))


def idle_s(name: str, *numbers: int) -> float:
    """The idle time of a rank."""
    idle = set(timed(make(name, *numbers)).idle_s)
    assert len(idle) == 1, "stages are alike, so all ranks idle as long"
    return idle.pop()


@given(ranks, many)
def test_gpipe_idles_while_it_fills_and_drains(s: int, m: int) -> None:
    timeline = timed(make("gpipe", s, m))
    assert timeline.efficiency == pytest.approx(1 - (s - 1) / (m + s - 1))
    assert timeline.peak_live == (m,) * s


@given(ranks, many)
def test_1f1b_takes_as_long_but_keeps_less(s: int, m: int) -> None:
    timeline = timed(make("1f1b", s, m))
    assert timeline.makespan_s == timed(make("gpipe", s, m)).makespan_s
    assert timeline.peak_live == tuple(min(m, s - rank) for rank in range(s))


@given(ranks, many, st.integers(2, 4))
def test_interleaving_divides_idle_time_by_the_stages_per_rank(s: int, more: int, v: int) -> None:
    m = s - 1 + more
    # a stage is 1 / v of what a rank computes, so times are in units of such a part
    assert idle_s("interleaved", s, m, v) == idle_s("1f1b", s, m)


@given(ranks, many)
def test_zero_bubble_leaves_a_third_of_the_idle_time(s: int, more: int) -> None:
    m = s - 1 + more
    assert idle_s("zero-bubble", s, m) == idle_s("1f1b", s, m) / 3
    assert timed(make("zero-bubble", s, m)).peak_live == (s,) * s


@given(ranks)
def test_a_batch_as_a_whole_keeps_one_rank_busy(s: int) -> None:
    assert timed(make("layer", s, 1)).makespan_s == 3 * s


@given(ranks, st.integers(1, 10))
def test_gems_gains_on_layer_at_the_memory_of_one_batch(s: int, pairs: int) -> None:
    # Both do 2 * pairs batches of equal size: layer one by one, gems as micro-batches of one step.
    layer_s = 2 * pairs * timed(make("layer", s, 1)).makespan_s
    gems = timed(make("gems", s, 2 * pairs))
    assert gems.peak_live == (1,) * s
    assert gems.makespan_s == s + 2 * pairs * 2 * s + (2 * pairs - 1)
    if pairs == 1:
        assert layer_s / gems.makespan_s == 6 * s / (5 * s + 1)
    # With many pairs, what one more pair costs decides.
    one_more_s = timed(make("gems", s, 2 * pairs + 2)).makespan_s - gems.makespan_s
    assert 2 * timed(make("layer", s, 1)).makespan_s / one_more_s == 3 * s / (2 * s + 1)


def test_gems_gains_a_third_at_four_stages_with_many_pairs() -> None:
    layer_s = 400 * timed(make("layer", 4, 1)).makespan_s
    assert layer_s / timed(make("gems", 4, 400)).makespan_s == pytest.approx(4 / 3, rel=1e-3)


@given(st.integers(2, 8), many)
def test_sums_of_gems_overlap_the_other_direction(s: int, pairs: int) -> None:
    times = StageTimes.even(s, reduce_s=1)
    late, early = (simulate(make(n, s, 2 * pairs), times) for n in ("gems", "gems-overlap"))
    last_s = timed(make("gems", s, 2 * pairs)).makespan_s
    assert late.makespan_s == last_s + 2  # the ranks at the ends sum stages S - 1 and 0, one by one
    assert early.makespan_s == last_s + 1  # stage S - 1 is summed on the way
    assert early.spans[Action.parse(f"R{s - 1}")][1] <= last_s


@given(ranks, many, st.integers(1, 3), st.integers(0, 3))
def test_chimera_idles_less(s: int, more: int, f: int, longer: int) -> None:
    m = 2 * ((s + more) // 2)
    b = f + longer
    timeline = timed(make("chimera", s, m), f, b)
    least = (s - 2 if s % 2 == 0 else s - 1) * b
    assert timeline.idle_s == pytest.approx((least,) * s)
    assert max(timeline.peak_live) <= s
    if s > 1:
        assert timeline.makespan_s < timed(make("gpipe", s, m), f, b).makespan_s


@pytest.mark.parametrize("s", [2, 4, 6, 8])
def test_chimera_keeps_what_the_paper_says(s: int) -> None:
    half = [s // 2 + 1 + rank for rank in range(s // 2)]
    assert timed(make("chimera", s, s)).peak_live == (*half, *reversed(half))


@given(st.sampled_from([n for n in SCHEDULES if n != "interleaved"]), st.integers(1, 6))
def test_nothing_is_lost(name: str, s: int) -> None:
    m = 1 if name == "layer" else 2 * s
    schedule = make(name, s, m)
    timeline = timed(schedule)
    assert set(timeline.spans) == {action for row in schedule.rows for action in row}
    assert timeline.busy_s == (3 * m,) * s


def test_messages_take_time() -> None:
    one = simulate(make("layer", 2, 1), StageTimes.even(2), {(0, 1): 0.5})
    assert one.makespan_s == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert one.spans[Action.parse("B0.0")] == (5, 7)


def test_sends_can_keep_the_rank() -> None:
    times, schedule = StageTimes.even(2), make("gpipe", 2, 2)
    beside, blocking = (
        simulate(schedule, times, lambda *_: 0.5, sends_block=block).spans
        for block in (False, True)
    )
    second = Action.parse("F0.1")
    assert (beside[second], blocking[second]) == ((1, 2), (1.5, 2.5))


def test_skips_are_waited_for_in_both_directions() -> None:
    link = {(0, 1): 0.0, (1, 2): 0.0, (0, 2): 10.0}
    layer = make("layer", 3, 1)
    assert simulate(layer, StageTimes.even(3), link).makespan_s == 9
    spans = simulate(layer, StageTimes.even(3), link, skips=[(0, 2)]).spans
    assert spans[Action.parse("F2.0")] == (11, 12)  # end of F0.0, and 10 on the way
    assert spans[Action.parse("B1.0")] == (14, 16)
    assert spans[Action.parse("B0.0")] == (24, 26)  # end of B2.0, and 10 on the way


def test_stages_on_the_same_rank_send_nothing() -> None:
    schedule = make("interleaved", 1, 2, 2)
    assert simulate(schedule, StageTimes.even(2), {}).makespan_s == 12


def test_stages_may_differ() -> None:
    times = StageTimes((1, 3), (2, 6), (1, 3), (1, 3), (5, 1))
    timeline = simulate(make("1f1b", 2, 2), times)
    assert timeline.busy_s == (6, 18)
    assert timeline.spans[Action.parse("R0")] == (21, 26)
    assert timeline.makespan_s == 26
    assert timeline.peak_bytes((100, 10)) == (200, 10)


def test_a_rank_that_holds_several_stages_keeps_the_sum_of_their_bytes() -> None:
    assert timed(make("interleaved", 1, 1, 3)).peak_bytes((1, 10, 100)) == (111,)


def test_wrong_times_are_refused() -> None:
    with pytest.raises(PlanError, match="forward_s has 1, backward_s has 2"):
        StageTimes((1,), (2, 2), (1, 1), (1, 1), (0, 0))
    with pytest.raises(PlanError, match="times of 3 stages for schedule 'gpipe', which has 2"):
        simulate(make("gpipe", 2, 2), StageTimes.even(3))
    with pytest.raises(PlanError, match="from stage 1 to stage 2; given: 0 to 1"):
        simulate(make("gpipe", 3, 2), StageTimes.even(3), {(0, 1): 1.0})
