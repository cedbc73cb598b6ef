"""Samples that are given to more replicas than one, or divided twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan
from ranks import run_ranks

NET = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(60, 3))
LOSS = nn.CrossEntropyLoss()
X, Y = torch.randn(7, 2, 5, 4), torch.arange(7) % 3


def test_the_same_samples_evaluated_on_all_replicas_are_told() -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        for _ in range(2):
            model.evaluate(X, Y, lambda y, _t: y.double().sum().view(1))

    with pytest.warns(UserWarning, match=r"all 2 replicas gave model\.evaluate the same") as told:
        run_ranks(2, check)
    assert len(told) == 2


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, width=2)], ids=str)
def test_a_share_is_not_divided_again(layout: Layout) -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(NET), mesh, example=X, loss=LOSS)
        x, y = model.shard(X, Y)
        for trees in ((x, y), ({"image": x}, y), (X, {"label": y})):
            with pytest.raises(UsageError, match="that is this rank's part of one of shape"):
                model.shard(*trees)

    run_ranks(layout.size, check, plan=Plan(layout=layout))
