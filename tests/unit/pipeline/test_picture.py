"""Pictures of schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.parallel.pipeline.picture import draw
from fivefold.parallel.pipeline.schedules import SCHEDULES, make
from fivefold.parallel.pipeline.simulate import StageTimes, simulate


def test_the_second_chain_is_drawn_in_lower_case() -> None:
    assert draw(make("gems", 2, 2)).splitlines() == [
        "rank 0 |F0......B0--f1b1--....|",
        "rank 1 |..F0B0--f1........b1--|",
        "F0 forward of micro-batch 0, B backward, lower case: the second chain, . idle",
    ]


def test_stages_are_named_where_a_rank_has_several() -> None:
    assert draw(make("zero-bubble", 1, 1, 2)).splitlines() == [
        "rank 0 |F0.0F1.0I1.0W1.0I0.0W0.0|",
        "F0.0 forward of stage 0, micro-batch 0, I gradients of inputs, W gradients of weights, . idle",
    ]


def test_sums_have_their_own_line_and_columns_a_length() -> None:
    schedule = make("layer", 2, 1)
    timeline = simulate(schedule, StageTimes.even(2, 0.5, 1.0, reduce_s=0.5))
    assert draw(schedule, timeline).splitlines() == [
        "rank 0 |F0......B0--..|",
        "sums   |............R0|",
        "rank 1 |..F0B0--......|",
        "sums   |........R1....|",
        "F0 forward of micro-batch 0, B backward, R sum over replicas, . idle, a column is 0.25 s",
    ]


def test_times_that_differ_are_drawn_to_scale() -> None:
    schedule = make("layer", 2, 1)
    times = StageTimes((1, 3), (2, 2), (1, 1), (1, 1), (0, 0))
    assert draw(schedule, simulate(schedule, times)).splitlines()[:2] == [
        "rank 0 |F.....B0|",
        "rank 1 |.F0-B0..|",
    ]


@given(
    st.sampled_from([n for n in SCHEDULES if n != "layer"]), st.integers(1, 5),
    st.integers(1, 40), st.integers(40, 120),
)  # fmt: skip
def test_pictures_fit(name: str, ranks: int, pairs: int, width: int) -> None:
    several = 2 if name == "interleaved" else 1
    lines = draw(make(name, ranks, 2 * pairs, several), width=width).splitlines()
    rows, legend = lines[:ranks], " ".join(lines[ranks:])
    assert all(len(line) <= width for line in lines)
    assert len({len(row) for row in rows}) == 1
    assert ("~" in rows[0]) == ("columns left out" in legend)


def test_what_is_left_out_is_counted() -> None:
    short, long = (draw(make("gpipe", 2, 8), width=w).splitlines() for w in (40, 100))
    assert "~" not in long[0]
    left_out = len(long[0]) - len(short[0]) + 1
    assert f"~ {left_out} columns left out" in " ".join(short[2:])
    assert short[0].partition("~")[0] == long[0][: short[0].index("~")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_drawn(name: str) -> None:
    schedule = make(name, 3, 1 if name == "layer" else 2, 2 if name == "interleaved" else 1)
    assert len(draw(schedule).splitlines()) >= 4
