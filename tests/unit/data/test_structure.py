"""How batches are built, whatever their values and sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fivefold.data.remote.checks import structure_of
from fivefold.data.workers import Key


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def built(batch: Any, samples: int = 4) -> str:
    return structure_of(batch, Key(0, 0, 0, samples))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4, 3, 8), torch.ones(4, 5, 6)),
        ((torch.zeros(4), [1, 2]), (torch.zeros(4), [3, 4, 5])),
        ({"x": np.zeros(4), "n": 1}, {"x": np.ones(4), "n": 7}),
        (Pair(torch.zeros(2), 1), Pair(torch.zeros(3), 2)),
        ((1.5, "a", b"x", None), (float("nan"), "bc", b"", None)),
        (torch.zeros(()), torch.ones(())),
    ],
)
def test_values_and_sizes_are_no_matter(one: Any, other: Any) -> None:
    assert built(one) == built(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 3, 1)),
        (torch.zeros(4), torch.zeros(4).double()),
        (torch.zeros(4, 3), torch.zeros(3, 3)),
        (torch.zeros(4), np.zeros(4, np.float32)),
        ((torch.zeros(4),), [torch.zeros(4)]),
        ((torch.zeros(4), 1), (torch.zeros(4),)),
        ({"x": 1}, {"y": 1}),
        ((1,), ("1",)),
        (Pair(torch.zeros(2), 1), (torch.zeros(2), 1)),
    ],
)
def test_containers_kinds_dims_and_numbers_of_samples_are(one: Any, other: Any) -> None:
    assert built(one) != built(other)


def test_the_number_of_samples_is_that_of_the_batch() -> None:
    assert built(torch.zeros(4, 2), 4) == built(torch.zeros(3, 2), 3)
