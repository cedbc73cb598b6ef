"""Plans within a memory budget, carried out: steps need no more than the planner said to be enough."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.cluster.description import Cluster, Device, LinkCost
from fivefold.mesh import Mesh
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.memory import Predicted
from fivefold.plan import Layout, Plan
from fivefold.tune.candidates import Candidate
from fivefold.tune.predict import Case, Prediction
from fivefold.tune.report import Question, plan_of
from fivefold.tune.search import search
from fivefold.tune.subject import Subject
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "tiles"))

from live import Live

BATCH, IMAGE = 4, (3, 32, 32)
LINK = LinkCost(1e-4, 1e9)
WHERE = Cluster(
    "test", 1, 8, Device(1 << 30, Costs.flops_per_s, Costs.copied_bytes_per_s), LINK, LINK
)


class Net(nn.Module):
    """With branches, which hold more than a chain does, and outputs as large as images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1))
            for _ in range(5)
        )
        self.last = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, *IMAGE, generator=draw)
    return x, torch.randint(4, (BATCH, *IMAGE[1:]), generator=draw)


def planned(net: nn.Module, candidate: Candidate, room: float) -> tuple[Plan, Prediction]:
    """A plan for more memory than the least by a part `room` of what keeping everything takes more."""
    subject = Subject(net, IMAGE, WHERE)
    free, least = (
        Case(subject, one, BATCH, "sgd").memory_bytes()
        for one in (candidate, replace(candidate, budget="1B"))
    )
    memory = least + int(room * (free - least))
    found = search(subject, [candidate], BATCH, memory)
    told = next(one for one in found.best if one.candidate.shard == candidate.shard)
    assert told.candidate.budget and told.memory_bytes <= memory
    question = Question("m:net", IMAGE, BATCH, candidate.layout.size, memory, WHERE)
    return Plan.parse(plan_of(replace(found, best=(told,)), question).to_toml()), told


def steps(net: nn.Module, plan: Plan) -> list[tuple[Predicted, Predicted, int, int]]:
    """By rank: what is told before and after some steps; the most alive in one; the optimiser's bytes."""

    def check(mesh: Mesh) -> tuple[Predicted, Predicted, int, int]:
        own = copy.deepcopy(net)
        model = ff.parallelize(own, mesh, example=batch()[0], loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        mine = model.shard(*batch())
        before = model.memory(*mine)
        for _ in range(4):
            model.step(*mine)
            optim.step()
        with Live() as live:
            model.step(*mine)
        state = (one["momentum_buffer"] for one in optim.state.values())
        return before, model.memory(*mine), live.peak_bytes, sum(map(_bytes, state))

    return run_ranks(plan.layout, check, plan=plan)


def _bytes(tensor: Tensor) -> int:
    return getattr(tensor, "to_local", lambda: tensor)().nbytes


@pytest.mark.parametrize("room", [0.0, pytest.param(0.5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Layout()),
        pytest.param(Candidate(Layout(data=2)), marks=pytest.mark.long),
        pytest.param(Candidate(Layout(data=2), shard="optimizer"), marks=pytest.mark.long),
        pytest.param(Candidate(Layout(width=2)), marks=pytest.mark.long),
        pytest.param(Candidate(Layout(pipe=2), "1f1b", 2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_does_with_what_was_planned(candidate: Candidate, room: float) -> None:
    torch.manual_seed(0)
    net = Net()
    plan, told = planned(net, candidate, room)
    assert plan.memory.shard == candidate.shard
    for before, after, peak_bytes, state_bytes in steps(net, plan):
        standing = after.total_bytes - after.peak_bytes + state_bytes
        assert before.total_bytes + 2 * before.trained_bytes <= told.memory_bytes
        assert after.total_bytes + state_bytes <= told.memory_bytes
        if candidate.shard == "none":  # gathered parameters would count as made by the step
            assert standing + peak_bytes <= told.memory_bytes


@pytest.mark.parametrize("room", [pytest.param(0.1, marks=pytest.mark.long), 0.5])
def test_a_run_is_no_slower_than_planned(room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both by the same estimates: a run measures what torch takes around spans, which no plan knows, and
    # times no nodes before its first step.
    monkeypatch.setattr("fivefold.parallel.memory.step.measured_span", lambda _: 0.0)
    torch.manual_seed(0)
    net = Net()
    plan, told = planned(net, Candidate(Layout()), room)
    ((before, *_),) = steps(net, plan)
    assert before.choices is not None
    run = before.choices.step_s / before.choices.free_s
    assert 1.0 < run <= told.step_s / (told.step_s - told.parts.again_s) * 1.005
