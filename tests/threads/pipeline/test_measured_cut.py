"""Cuts by measured times: all ranks agree on them, and nets whose arithmetic misleads are cut better."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.pipeline.cut import balanced
from fivefold.parallel.pipeline.memory import predicted_in_stages
from fivefold.parallel.pipeline.timing import timed
from fivefold.plan import Layout, Pipeline, Plan, Tiles
from ranks import run_ranks

CHANNELS = 64
X, Y = torch.rand(4, CHANNELS, 12, 12), torch.rand(4, CHANNELS, 12, 12)
REPEATS = 9
"""so many that what other processes of the machine take is not read off as a step's own"""


class Slow(nn.Module):
    """An element costs as much as thousands of those that a convolution adds and multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.polygamma(1, x.abs() + 1)


def misleading() -> nn.Module:
    """Nearly all arithmetic is in the last two layers, nearly all time in the four before them."""
    slow = (Slow() for _ in range(4))
    quick = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), *slow, *quick)


def test_a_net_whose_arithmetic_misleads_is_cut_better() -> None:
    net, plan = misleading(), Plan(layout=Layout(pipe=2))
    found = timed(net, plan, 0, X, repeats=REPEATS)
    tape = found.program.tape
    cuts = {"estimated": balanced(tape, 2), "measured": balanced(tape, 2, node_s=found.node_s())}
    again = timed(net, plan, 0, X, repeats=REPEATS).node_s()

    def slowest_s(name: str) -> float:
        bounds = cuts[name].bounds(tape)
        return max(sum(again[first:stop]) for first, stop in itertools.pairwise(bounds))

    assert cuts["estimated"] != cuts["measured"]
    # Half as long on a quiet machine: the four slow layers are in one stage, or two in each.
    assert slowest_s("measured") < 0.8 * slowest_s("estimated")


@pytest.mark.parametrize(
    "layout", [Layout(pipe=2), Layout(data=2, pipe=2), Layout(pipe=2, width=2)], ids=str
)
def test_all_ranks_cut_alike_and_leave_the_net_as_it_was(layout: Layout) -> None:
    net = nn.Sequential(misleading(), nn.BatchNorm2d(CHANNELS), nn.Dropout(0.1))
    plan = Plan(
        layout=layout, pipeline=Pipeline("gpipe", 2, cut="measured"), tiles=Tiles(fuse="never")
    )

    def check(mesh: Mesh) -> tuple[Any, dict[str, Tensor]]:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=X, loss=nn.MSELoss())
        state = copy.deepcopy(model.full_state_dict())
        assert all(p.grad is None for p in model.parameters())
        model.step(*model.shard(X, Y))
        return str(model.stages).splitlines()[:3], state

    (cut, _), *others = told = run_ranks(layout.size, check, plan=plan)
    assert all(other == cut for other, _ in others)
    before = net.state_dict()
    assert all(torch.equal(value, before[name]) for _, s in told for name, value in s.items())


def test_memory_needs_to_know_where_the_net_is_cut() -> None:
    plan = Plan(layout=Layout(pipe=2), pipeline=Pipeline(cut="measured"))
    with pytest.raises(UsageError, match=r"decided when a run starts: ask its model"):
        predicted_in_stages(misleading(), plan, 0, inputs=X, targets=Y, loss=nn.MSELoss())
