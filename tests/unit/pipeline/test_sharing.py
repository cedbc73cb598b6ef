"""Schedules on ranks that share cores."""

from __future__ import annotations

import pytest

from fivefold.parallel.pipeline.schedule import Action
from fivefold.parallel.pipeline.schedules import SCHEDULES, make
from fivefold.parallel.pipeline.simulate import StageTimes, simulate
from fivefold.tune.predict import shared

TIMES = StageTimes.even(4, 1.0, 2.0, 0.5)


def free(_action: Action, _computing: int) -> float:
    return 1.0


def quarter(_source: int, _target: int) -> float:
    return 0.25


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_enough_cores_it_is_what_is_simulated(name: str) -> None:
    each = 2 if name == "interleaved" else 1
    schedule = make(name, 4, 1 if name == "layer" else 8, each)
    times = StageTimes.even(schedule.stages, 1.0, 2.0, 0.5)
    found = shared(schedule, times, free, quarter)
    told = simulate(schedule, times, quarter, sends_block=True)
    assert found.makespan_s == pytest.approx(told.makespan_s)
    assert shared(schedule, times, free).spans.keys() == simulate(schedule, times).spans.keys()


def test_one_core_does_one_thing_after_the_other() -> None:
    for name in ("gpipe", "1f1b", "zero-bubble"):
        found = shared(make(name, 4, 8), TIMES, lambda _action, computing: 1 / computing)
        assert max(end for a, (_, end) in found.spans.items() if a.op != "R") == pytest.approx(96)


def test_layers_in_turn_have_a_core_of_their_own() -> None:
    found = shared(
        make("layer", 4, 1), TIMES, lambda _action, computing: 2.0 if computing == 1 else 1.0
    )
    assert max(end for a, (_, end) in found.spans.items() if a.op != "R") == pytest.approx(6)


def test_two_cores_for_two_directions() -> None:
    # At most two ranks compute at once: two cores are as good as four.
    schedule = make("gems", 4, 8)
    two = shared(schedule, TIMES, lambda _action, computing: min(1.0, 2 / computing))
    assert two.makespan_s == pytest.approx(simulate(schedule, TIMES).makespan_s)
