"""Plans by turns, and what is expected of them, for tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Memory, Plan, Tiles
from ranks import run_ranks
from small_models import batch_of, judged, loss_of, net_of

__all__ = ["ONE", "expect_exact", "plan_of", "refused"]

ONE = Layout()


def plan_of(turns: str, layout: Layout = ONE, **memory: Any) -> Plan:
    return Plan(layout=layout, tiles=Tiles(strict=True, turns=turns), memory=Memory(**memory))


def expect_exact(name: str, plan: Plan, steps: int = 2) -> None:
    report = judged(net_of(name), plan, steps, loss_of(name), lambda: batch_of(name))
    assert report.passed, (report.verdict(), report.notes, report.worst)


def refused(net: nn.Module, plan: Plan, says: str, shape: tuple[int, ...] = (2, 3, 15, 13)) -> None:
    def check(mesh: Mesh) -> None:
        model = parallelize(net.double(), mesh, loss=nn.MSELoss())
        x = torch.randn(*shape, dtype=torch.float64)
        with torch.no_grad():
            y = copy.deepcopy(net)(x)
        with pytest.raises((UsageError, PlanError), match=says):
            model.step(x, y)

    run_ranks(plan.layout, check, plan=plan)
