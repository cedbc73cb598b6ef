"""Masks are a function of the element, not of the rank or the order of draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.parallel.randomness import alpha_drop, drop, key_of, uniform

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_any_cut_of_the_rows_draws_the_same_numbers(
    n: int, width: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, n))
    key = key_of(3, 5, "layer.drop", 0)
    whole = uniform(torch.Size([n, width]), 0, key, CPU)
    head = uniform(torch.Size([cut, width]), 0, key, CPU)
    tail = uniform(torch.Size([n - cut, width]), cut * width, key, CPU)
    assert torch.equal(torch.cat([head, tail]), whole)


def test_numbers_are_uniform_and_keys_are_independent() -> None:
    n = 1 << 18
    draws = [uniform(torch.Size([n]), 0, key_of(0, 0, "a", call), CPU) for call in range(2)]
    for u in draws:
        assert u.min() >= 0.0 and u.max() < 1.0
        assert abs(u.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / n)
        counts = torch.histc(u, 64, 0, 1)
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
        assert chi2 < 63 + 6 * math.sqrt(2 * 63)
        neighbours = torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1]
        assert abs(neighbours) < 6 / math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack(draws))[0, 1]) < 6 / math.sqrt(n)


def test_every_part_of_the_key_matters() -> None:
    keys = {key_of(0, 0, "a", 0), key_of(1, 0, "a", 0), key_of(0, 1, "a", 0), key_of(0, 0, "b", 0)}
    keys.add(key_of(0, 0, "a", 1))
    assert len(keys) == 5
    assert all(0 <= key < 1 << 63 for key in keys)


@pytest.mark.parametrize("inplace", [False, True])
def test_drop_scales_what_it_keeps(inplace: bool) -> None:
    x = torch.ones(1000, dtype=torch.float64)
    kept = uniform(x.shape, 0, 1, CPU) >= 0.25
    y = drop(x, kept, 0.25, inplace)
    assert (y is x) == inplace
    assert set(y.tolist()) == {0.0, 1 / 0.75}
    assert drop(torch.ones(3), torch.zeros(3, dtype=torch.bool), 1.0, False).tolist() == [0, 0, 0]


@pytest.mark.parametrize("inplace", [False, True])
def test_alpha_drop_keeps_mean_and_variance(inplace: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(200_000, dtype=torch.float64)
    y = alpha_drop(x.clone(), uniform(x.shape, 0, 1, CPU) >= 0.2, 0.2, inplace)
    assert abs(y.mean()) < 0.02
    assert abs(y.std() - 1) < 0.02
