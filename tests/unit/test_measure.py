"""The measure of exact: what an error is relative to, and how much of it is allowed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fivefold.train.verify.measure import StepResult, Values, errors, not_finite
from fivefold.train.verify.one_process import neighbour
from fivefold.train.verify.report import Quantity, Replicas, Report, TensorReport, tolerance


def snapshot(**values: Values) -> StepResult:
    empty: dict[str, dict[str, Tensor]] = {
        name: {} for name in ("loss", "outputs", "gradients", "buffers", "weights")
    }
    return StepResult(**{**empty, **values})  # type: ignore[arg-type]


def error(quantity: str, got: Values, truth: Values) -> dict[str, float]:
    return errors(snapshot(**{quantity: got}), snapshot(**{quantity: truth}))[quantity]


def test_outputs_are_relative_to_their_norm() -> None:
    truth = torch.tensor([3e-5, 4e-5])
    assert error("outputs", {"y": truth * 1.5}, {"y": truth})["y"] == pytest.approx(0.5)
    assert error("outputs", {"y": truth}, {"y": torch.zeros(2)})["y"] == pytest.approx(5e-5)


def test_a_gradient_that_is_only_rounding_is_relative_to_all_gradients() -> None:
    truth = {"w": torch.tensor([1e3]), "b": torch.tensor([1e-14])}
    got = {"w": torch.tensor([1e3]), "b": torch.tensor([-1e-14])}
    assert error("gradients", got, truth)["b"] == pytest.approx(2e-14 / (1e-6 * 1e3))
    small = {"w": torch.tensor([1e3]), "b": torch.tensor([0.01])}
    assert error("gradients", {**small, "b": torch.tensor([0.02])}, small)["b"] == pytest.approx(1)


def test_a_running_mean_is_relative_to_the_spread_of_the_data() -> None:
    truth = {"bn.running_mean": torch.tensor([1e-9]), "bn.running_var": torch.tensor([4.0])}
    got = {"bn.running_mean": torch.tensor([3e-9]), "bn.running_var": torch.tensor([5.0])}
    found = error("buffers", got, truth)
    assert found["bn.running_mean"] == pytest.approx(1e-9, rel=1e-5)
    assert found["bn.running_var"] == pytest.approx(0.25)


def test_integers_are_equal_or_not() -> None:
    truth = {"n": torch.tensor(3)}
    assert error("buffers", {"n": torch.tensor(3)}, truth) == {"n": 0.0}
    assert error("buffers", {"n": torch.tensor(4)}, truth) == {"n": math.inf}


@pytest.mark.parametrize(
    "got", [{}, {"w": None}, {"w": torch.zeros(2)}, {"w": torch.tensor([float("nan")])}], ids=str
)
def test_what_is_missing_or_no_number_is_infinitely_wrong(got: Values) -> None:
    assert error("gradients", got, {"w": torch.ones(1)})["w"] == math.inf
    assert error("gradients", {"w": torch.ones(1)}, got)["w"] == math.inf


def test_no_gradient_on_both_sides_is_no_error() -> None:
    assert error("gradients", {"w": None}, {"w": None}) == {"w": 0.0}


def test_float32_is_compared_in_float64() -> None:
    third = torch.tensor([1.0], dtype=torch.float64) / 3
    found = error("outputs", {"y": third.float()}, {"y": third})["y"]
    assert 1e-9 < found < 2**-24


def test_what_is_not_finite_is_named() -> None:
    values = snapshot(
        gradients={"a": torch.tensor([1.0, math.inf]), "b": None}, weights={"c": torch.zeros(1)}
    )
    assert list(not_finite(values)) == ["a (gradients)"]


@pytest.mark.parametrize(
    ("own", "dtype", "expected"),
    [
        (0.0, "float64", 1e-10),
        (1e-11, "float64", 1e-9),
        (1e-3, "float64", 1e-7),
        (math.inf, "float64", 1e-7),
        (0.0, "float32", 4 * 2.0**-23),
        (0.01, "float32", 0.02),
        (math.inf, "float32", 4 * 2.0**-23),
    ],
)
def test_tolerances(own: float, dtype: str, expected: float) -> None:
    assert tolerance(own, dtype) == pytest.approx(expected)


def test_a_nudge_moves_every_number_to_a_neighbour() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 1e-30] * 50, dtype=torch.float64)

    def moved(leaf: Tensor, seed: int) -> Tensor:
        found: Tensor = neighbour(leaf, torch.Generator().manual_seed(seed))
        return found

    assert torch.equal(moved(torch.arange(3), 4), torch.arange(3))
    up, down = (torch.nextafter(x, torch.full_like(x, end)) for end in (math.inf, -math.inf))
    assert bool(((moved(x, 4) == up) | (moved(x, 4) == down)).all())
    assert 50 < int((moved(x, 4) == up).sum()) < 150
    assert torch.equal(moved(x, 4), moved(x, 4))
    assert not torch.equal(moved(x, 5), moved(x, 4))


def test_each_tensor_counts_once_with_its_worst_step() -> None:
    items = [
        TensorReport("weights", "w", s, e, 0.0, 1.0) for s, e in ((0, 0.1), (1, 0.3), (2, 0.2))
    ]
    quantity = Quantity.of("weights", [*items, TensorReport("weights", "v", 0, 0.15, 0.0, 1.0)])
    assert [(i.name, i.step) for i in quantity.worst] == [("w", 1), ("v", 0)]
    assert quantity.passed
    assert Quantity.of("buffers", []).passed


def test_the_verdict_names_the_tensor_that_decides() -> None:
    def report(error: float, apart: float = 0.0) -> Report:
        item = TensorReport("weights", "fc.weight", 0, error, 0.0, 1e-10)
        quantities = (Quantity.of("loss", []), Quantity.of("weights", [item]))
        replicas = Replicas(apart, "fc.bias (gradients) of rank 1" if apart else "")
        return Report("net", "data=3", "float64", 8, 3, 0, quantities, replicas)

    assert report(3e-14).verdict() == (
        "exact: net under data=3 equals one process (largest error 3e-14 in fc.weight, tolerance 1e-10)"
    )
    assert report(2e-3).verdict() == (
        "NOT exact: net under data=3 differs from one process (largest error 2e-03 in fc.weight, "
        "tolerance 1e-10)"
    )
    assert report(0.0, 0.5).verdict() == (
        "NOT exact: net under data=3 differs from one process (replicas differ by 5e-01: fc.bias "
        "(gradients) of rank 1)"
    )
