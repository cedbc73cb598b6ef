"""Decisions by validations: what to keep, when to stop, when to lower the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fivefold.errors import UsageError
from fivefold.offload import BestSoFar, EarlyStopping, Plateau, Result


def results(*values: float) -> list[Result]:
    return [
        Result(epoch, 10 * epoch, {"accuracy": value}, (value, 1.0))
        for epoch, value in enumerate(values, start=1)
    ]


def test_the_first_of_the_best_is_kept() -> None:
    best = BestSoFar("accuracy")
    kept = [best.update(result) for result in results(math.nan, 0.5, 0.4, 0.7, 0.7, 0.6)]
    assert kept == [False, True, False, True, False, False]
    assert best.result is not None
    assert (best.result.epoch, best.result.step) == (4, 40)
    lowest = BestSoFar("accuracy", "min")
    assert [lowest.update(r) for r in results(math.inf, 0.5, 0.6, 0.2)] == [True, True, False, True]


def test_the_best_of_a_run_that_goes_on_is_the_best_of_all() -> None:
    told = [
        Result.known(
            epoch=e, step=e, figures={"accuracy": v}, sums=(v,), weights={"w": torch.ones(e)}
        )
        for e, v in enumerate((0.5, 0.7, 0.6, 0.8), start=1)
    ]
    first = BestSoFar("accuracy")
    resumed = BestSoFar("accuracy")
    resumed.load_state_dict(first.state_dict())
    assert resumed.result is None
    assert [first.update(result) for result in told[:2]] == [True, True]
    resumed.load_state_dict(first.state_dict())
    assert resumed.result == told[1]
    assert torch.equal(resumed.result.state_dict()["w"], torch.ones(2))
    assert [resumed.update(result) for result in told[2:]] == [False, True]


def test_it_stops_after_so_many_validations_without_improvement() -> None:
    stopping = EarlyStopping("accuracy", patience=2)
    assert [stopping.update(r) for r in results(0.1, 0.3, 0.3, 0.4, math.nan, 0.4)] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
    picky = EarlyStopping("accuracy", patience=1, least=0.1)
    assert [picky.update(result) for result in results(0.1, 0.3, 0.35)] == [False, False, True]


def test_a_resumed_run_goes_on_counting() -> None:
    whole, first = EarlyStopping("accuracy", 3), EarlyStopping("accuracy", 3)
    told = results(0.5, 0.4, 0.4, 0.4)
    expected = [whole.update(result) for result in told]
    found = [first.update(result) for result in told[:2]]
    resumed = EarlyStopping("accuracy", 3)
    resumed.load_state_dict(first.state_dict())
    assert found + [resumed.update(result) for result in told[2:]] == expected


def test_a_plateau_lowers_the_learning_rate() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau = Plateau(ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1), "accuracy")
    assert [plateau.update(r) for r in results(0.5, 0.4, 0.4, 0.6)] == [False, False, True, False]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        BestSoFar("accurac_").update(results(0.5)[0])
    with pytest.raises(UsageError, match="patience is 0"):
        EarlyStopping("accuracy", 0)
    with pytest.raises(UsageError, match="valid: min, max"):
        BestSoFar("accuracy", "larger")  # type: ignore[arg-type]
