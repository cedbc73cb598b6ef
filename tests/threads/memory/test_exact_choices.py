"""Whatever is kept, computed again or spilled: gradients and buffers stay as they are, bit by bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.mesh import Mesh
from fivefold.parallel.memory import saving, step
from fivefold.plan import Layout, Plan, Provenance
from fivefold.recipes import models
from fuzz.choices import drawn
from ranks import run_ranks
from small_models import SMALL, batch_of, loss_of, net_of

STEPS = 4


def layouts(name: str) -> list[Layout]:
    axis = "width" if models.dims(name) == 2 else "depth"
    return [
        Layout(), Layout(data=2), Layout(**{axis: 2}), Layout(pipe=2), Layout(data=2, **{axis: 2}),
        Layout(pipe=2, **{axis: 2}),
    ]  # fmt: skip


def choose(self: step.StepBudget, decision: step.Decision, _: Any) -> None:
    """Nothing with the seed 0, else at random, anew once nodes were timed."""
    decision.due = False
    seed = self._mesh.plan.numerics.seed
    if seed:
        rng = random.Random(f"{seed} {self.rank} {decision.steps}")
        decision.choice = drawn(rng, len(decision.profile.nodes))
        decision.pool = self.pool(rng.choice([0, 4096, 1 << 20]))


def trained(
    mesh: Mesh, net: nn.Module, loss: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    found: list[Tensor] = []
    own = copy.deepcopy(net)
    model = ff.parallelize(own, mesh, example=batches[0][0], loss=copy.deepcopy(loss))
    model.seed = 7  # of masks
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches:
        optim.zero_grad()
        found.append(model.step(*model.shard(x, y)))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [b.clone() for b in model.buffers()]
        optim.step()
    return found


def cases(*, all_layouts: bool) -> list[tuple[str, Layout]]:
    """Every model under all layouts, or each under one of them."""
    found: list[tuple[str, Layout]] = []
    for number, name in enumerate(SMALL):
        mine = layouts(name)
        found += [(name, one) for one in (mine if all_layouts else [mine[number % len(mine)]])]
    return found


@pytest.mark.long(every=12)
@pytest.mark.timeout(400)  # with others on these cores, a net with many nodes takes its time
@pytest.mark.parametrize(("name", "layout"), cases(all_layouts=False), ids=str)
def test_bits_stay(name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    bits_stay(name, layout, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "layout"), cases(all_layouts=True), ids=str)
def test_bits_stay_under_all_layouts(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits_stay(name, layout, monkeypatch)


def bits_stay(name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LEAST_BYTES", 1)
    monkeypatch.setattr(step.StepBudget, "choose", choose)
    net, made = net_of(name), list[list[list[Tensor]]]()
    batches = [batch_of(name) for _ in range(STEPS)]
    for seed in (0, 1, 2):
        # Which layers share an exchange is decided by measured times, unless it is said.
        words: dict[str, Any] = {
            "memory.budget": "1TiB", "memory.disk": str(Path.cwd()), "tiles.fuse": "2",
        }  # fmt: skip
        if layout.pipe > 1:
            words |= {"pipeline.micro_batches": 2, "pipeline.schedule": "1f1b"}
        plan = Plan(layout=layout).replace({**words, "numerics.seed": seed}, Provenance())
        case = net, loss_of(name), batches
        made.append(run_ranks(layout, trained, *case, plan=plan, timeout_s=300))
    for other in made[1:]:
        for own, right in zip(other, made[0], strict=True):
            assert len(own) == len(right) > STEPS
            assert all(map(torch.equal, own, right))
