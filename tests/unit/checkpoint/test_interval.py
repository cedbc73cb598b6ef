"""When to save: formulas against a simulation of failures, and against each other."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.interval import Level, daly, two_level, young
from fivefold.errors import UsageError

COSTS = st.floats(0.01, 100)
TIMES = st.floats(1000, 1e6)


def test_young_is_what_the_paper_says() -> None:
    # 148.8 s per save and 3 h between failures: half an hour.
    assert young(148.8, 3 * 3600) == pytest.approx(1793, abs=1)
    assert young(0.0, 100.0) == 0.0 and young(0.0, math.inf) == 0.0
    assert math.isinf(young(1.0, math.inf))


@given(COSTS, TIMES)
def test_daly_is_young_where_saves_are_cheap(cost_s: float, mtbf_s: float) -> None:
    assert daly(cost_s, mtbf_s) <= young(cost_s, mtbf_s) + 1e-9
    assert daly(cost_s / 1e6, mtbf_s) == pytest.approx(young(cost_s / 1e6, mtbf_s), rel=1e-3)


def expected_s(work_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected time for `work_s` and a save, starting over after each failure (exponential failures)."""
    return mtbf_s * math.expm1((work_s + cost_s) / mtbf_s)


@pytest.mark.parametrize("cost_s", [1.0, 30.0, 300.0, 1500.0])
def test_daly_is_near_the_true_optimum(cost_s: float) -> None:
    mtbf_s = 3600.0

    def waste(work_s: float) -> float:
        return expected_s(work_s, cost_s, mtbf_s) / work_s

    best = min(waste(work_s) for work_s in range(10, 8000, 5))
    assert waste(daly(cost_s, mtbf_s)) <= 1.005 * best


@given(COSTS, COSTS, TIMES, TIMES, st.sampled_from([0.0, 0.001, 0.035]))
def test_no_other_interval_wastes_less(
    cost_s: float, flush_s: float, near_s: float, far_s: float, cap: float
) -> None:
    found = two_level(Level(cost_s, near_s), Level(flush_s, far_s), cap)
    assert not cap or found.overhead <= cap * (1 + 1e-9)
    n, every = found.flush_every, found.every_s

    def waste(n: int, every_s: float) -> float:
        saving = cost_s + flush_s / n
        if cap and saving / every_s > cap * (1 + 1e-9):
            return math.inf
        return saving / every_s + every_s / 2 * (1 / near_s + n / far_s)

    assert waste(n, every) == pytest.approx(found.waste)
    for other_n in {max(1, n - 1), n, n + 1, 2 * n}:
        for factor in (0.5, 0.9, 1.0, 1.1, 2.0):
            assert waste(other_n, every * factor) >= found.waste * (1 - 1e-9)
        at_cap = (cost_s + flush_s / other_n) / cap if cap else every
        assert waste(other_n, at_cap) >= found.waste * (1 - 1e-9)


def test_one_level_is_young() -> None:
    found = two_level(Level(6.0, 3600.0), Level(100.0))
    assert found.every_s == pytest.approx(young(6.0, 3600.0)) and found.flush_every == 0
    assert found.overhead == pytest.approx(found.waste / 2)
    nothing_fails = two_level(Level(1.0), Level(1.0))
    assert math.isinf(nothing_fails.every_s) and nothing_fails.waste == 0
    assert two_level(Level(1.0), Level(1.0), 0.01).every_s == math.inf


def test_costs_of_nothing_give_no_nonsense() -> None:
    found = two_level(Level(0.0, 100.0), Level(5.0, 1000.0))
    assert 0 < found.every_s < 1 and found.flush_every > 1000
    assert two_level(Level(5.0, 100.0), Level(0.0, 1000.0)).flush_every == 1
    # All failures need the flushed copy: every save is flushed.
    assert two_level(Level(1.0), Level(9.0, 3600.0)).flush_every == 1


def simulated_waste(every_s: float, n: int, *, cost_s: float, flush_s: float, near_s: float,
                    far_s: float) -> float:  # fmt: skip
    """Time beyond the work itself, over a long run with random failures."""
    chance = random.Random(1)
    clock = work = local = flushed = 0.0
    saves = 0
    failure = chance.expovariate(1 / near_s + 1 / far_s)
    while work < 2e6:
        lasts = every_s + cost_s + (flush_s if (saves + 1) % n == 0 else 0.0)
        if clock + lasts > failure:
            clock = failure
            is_far = chance.random() < (1 / far_s) / (1 / near_s + 1 / far_s)
            work = flushed if is_far else local
            local = work
            failure = clock + chance.expovariate(1 / near_s + 1 / far_s)
            continue
        clock += lasts
        work += every_s
        local = work
        saves += 1
        flushed = work if saves % n == 0 else flushed
    return clock / work - 1


def test_a_simulated_run_wastes_what_is_predicted() -> None:
    costs = {"cost_s": 1.0, "flush_s": 20.0, "near_s": 4000.0, "far_s": 40000.0}
    found = two_level(Level(1.0, 4000.0), Level(20.0, 40000.0))
    waste = simulated_waste(found.every_s, found.flush_every, **costs)
    assert waste == pytest.approx(found.waste, rel=0.25)
    for factor, n in ((0.3, found.flush_every), (3.5, found.flush_every), (1.0, 1), (1.0, 200)):
        assert simulated_waste(found.every_s * factor, n, **costs) > waste


def test_steps_are_never_more_often_than_the_interval() -> None:
    found = two_level(Level(1.0, 5000.0), Level(0.0))
    assert found.every_s == pytest.approx(100.0)
    assert found.every_steps(10.0) == 10 and found.every_steps(9.0) == 12
    assert found.every_steps(1000.0) == 1
    assert two_level(Level(1.0), Level(0.0)).every_steps(1.0) == 10**15


@pytest.mark.parametrize(
    "call",
    [
        lambda: young(-1.0, 1.0), lambda: daly(1.0, 0.0), lambda: Level(math.nan),
        lambda: Level(1.0, math.nan), lambda: Level(math.inf, 1.0),
        lambda: two_level(Level(1.0), Level(1.0), 1.0),
        lambda: two_level(Level(1.0, 1.0), Level(1.0)).every_steps(0.0),
    ],
)  # fmt: skip
def test_nonsense_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match="expected"):
        call()
