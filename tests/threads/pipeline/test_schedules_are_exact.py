"""Every schedule computes what one process computes that accumulates over the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.plan import Layout, Memory, Pipeline, Plan
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks


class Skips(nn.Module):
    """Two skips, one of them over most of the net, a norm in every part, and two heads' worth of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.down = nn.Sequential(
            nn.Conv2d(6, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh())
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.last = nn.Conv2d(12, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        down = self.down(stem)
        return self.last(torch.cat([stem, self.up(self.body(down) + down)], 1))


def judged(
    plan: Plan,
    net: nn.Module | None = None,
    *,
    samples: int = 9,
    targets: Callable[[int], Tensor] | None = None,
    loss: nn.Module | None = None,
    shape: tuple[int, ...] = (3, 12, 8),
) -> Report:
    torch.manual_seed(2)
    net = net or Skips()
    make = targets or (lambda n: torch.randn(n, 5, *shape[1:]))
    batches = [(torch.randn(samples, *shape), make(samples)) for _ in range(2)]

    def check(mesh: Mesh) -> Report:
        return verify(
            lambda: copy.deepcopy(net),
            mesh,
            loss=loss or nn.MSELoss(),
            batch=batches.__getitem__,
            steps=2,
        )

    return run_ranks(plan.layout, check, plan=plan, timeout_s=60)[0]


def expect_exact(report: Report) -> None:
    assert report.passed, report
    assert report.replicas.difference == 0.0


def plan(layout: Layout, schedule: Any, micro_batches: int = 0, **more: Any) -> Plan:
    return Plan(layout=layout, pipeline=Pipeline(schedule, micro_batches, **more))


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches"),
    [
        ("layer", 3, 1),
        ("gpipe", 2, 3),
        ("1f1b", 2, 4),
        pytest.param("1f1b", 4, 5, marks=pytest.mark.slow),
        ("zero-bubble", 3, 4),
        ("gems", 2, 2),
        pytest.param("gems", 4, 4, marks=pytest.mark.slow),
        ("gems", 3, 4),
        ("gems-overlap", 2, 4),
        ("gems-overlap", 3, 2),
        ("chimera", 2, 4),
        ("chimera", 4, 8),
    ],
)
def test_a_schedule(schedule: str, ranks: int, micro_batches: int) -> None:
    expect_exact(judged(plan(Layout(pipe=ranks), schedule, micro_batches)))


class Deep(nn.Module):
    """As many places to cut as interleaved stages need, dropout among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
            )
            for i in range(6)
        )
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x.mean((2, 3))))


def labels(n: int) -> Tensor:
    found = torch.randint(0, 5, (n,))
    found[::4] = -100
    return found


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("layout", "schedule", "micro_batches", "more"),
    [
        (Layout(pipe=2), "interleaved", 4, {"stages_per_rank": 2}),
        (Layout(pipe=2), "interleaved", 3, {"stages_per_rank": 3}),
        (Layout(data=2, pipe=2), "1f1b", 3, {}),
        (Layout(data=2, pipe=2), "gems", 4, {}),
        (Layout(data=2, pipe=3), "zero-bubble", 4, {}),
        (Layout(pipe=2, height=2), "1f1b", 2, {}),
        (Layout(pipe=2, height=2), "zero-bubble", 2, {}),
        (Layout(pipe=2, width=2), "gems-overlap", 2, {}),
        pytest.param(Layout(data=2, pipe=2, height=2), "1f1b", 2, {}, marks=pytest.mark.slow),
        pytest.param(Layout(data=2, pipe=2, height=2), "gems", 2, {}, marks=pytest.mark.slow),
        (Layout(data=2, pipe=2, height=2), "chimera", 4, {}),
    ],
    ids=str,
)
def test_with_other_axes(
    layout: Layout, schedule: str, micro_batches: int, more: dict[str, Any]
) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]))
    made = plan(layout, schedule, micro_batches, **more)
    expect_exact(judged(made, Deep(), targets=labels, loss=loss, samples=11))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=2, height=2),
        pytest.param(Layout(pipe=2, height=2, width=2), marks=pytest.mark.slow),
        Layout(data=2, pipe=2),
    ],
    ids=str,
)
def test_skips_over_stages_in_tiles(layout: Layout) -> None:
    expect_exact(judged(plan(layout, "gpipe", 2)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("1f1b", "all"),
        ("gems", "auto"),
        ("zero-bubble", 4),
        pytest.param("zero-bubble", "all", marks=pytest.mark.slow),
    ],
)
def test_activations_computed_again(schedule: Any, recompute: int | str) -> None:
    made = Plan(
        layout=Layout(pipe=2, height=2),
        pipeline=Pipeline(schedule, 2),
        memory=Memory(recompute),
    )
    expect_exact(judged(made))


def test_micro_batches_that_are_empty_on_some_replicas() -> None:
    """Five samples over two replicas, three micro-batches: one of them is empty on the smaller replica."""
    loss = nn.CrossEntropyLoss()
    made = plan(Layout(data=2, pipe=2), "1f1b", 3)
    expect_exact(
        judged(made, Deep(), targets=lambda n: labels(n).clamp(min=0), loss=loss, samples=5)
    )
