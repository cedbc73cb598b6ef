"""Predicted memory of a rank of a pipeline against what is counted on the ranks themselves."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fivefold as ff
from fivefold.errors import PlanError
from fivefold.mesh import Mesh
from fivefold.parallel.pipeline.memory import predicted_in_stages
from fivefold.parallel.program.memory import Predicted
from fivefold.plan import Layout, Memory, Pipeline, Plan, Tiles
from ranks import run_ranks

TILES = Path(__file__).resolve().parents[3] / "benchmarks" / "tiles"
"""where memory is counted from outside"""
LOSS = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]))
X, Y = torch.randn(8, 3, 24, 20), torch.randint(0, 5, (8,))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    monkeypatch.syspath_prepend(str(TILES))
    yield __import__("live").Live
    sys.modules.pop("live", None)


def block(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    )


def small() -> nn.Module:
    return nn.Sequential(
        block(3), block(8), nn.MaxPool2d(2), block(8), nn.Dropout(0.2), block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def on_ranks(plan: Plan, live: Callable[[], Any]) -> list[tuple[int, Predicted]]:
    """The most alive in the fourth step of every rank, and what its model says beforehand.

    In the second and the third, nets are recorded again, on tensors that count here.
    """
    net = small()

    def counted(mesh: Mesh) -> tuple[int, Predicted]:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=X, loss=LOSS)
        told = model.memory(X.to("meta"), Y.to("meta"))
        x, y = model.shard(X, Y)
        for _ in range(3):
            model.step(x, y)
            model.zero_grad()
        with live() as count:
            model.step(x, y)
        return count.peak_bytes, told

    return run_ranks(plan.layout.size, counted, plan=plan)


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("schedule", "micro_batches", "stages_per_rank", "recompute"),
    [
        ("layer", 1, 1, 0),
        ("gpipe", 4, 1, 0),
        ("1f1b", 3, 1, 0),
        ("1f1b", 4, 1, 4),
        ("interleaved", 4, 2, 0),
        ("zero-bubble", 4, 1, 0),
        ("gems", 4, 1, 0),
        ("gems-overlap", 2, 1, 0),
        ("chimera", 4, 1, 0),
    ],
)
def test_it_is_what_the_ranks_need(
    schedule: Any, micro_batches: int, stages_per_rank: int, recompute: int, live: Callable[[], Any]
) -> None:
    plan = Plan(
        layout=Layout(pipe=2),
        pipeline=Pipeline(schedule, micro_batches, stages_per_rank),
        memory=Memory(recompute),
    )
    for peak, told in on_ranks(plan, live):
        assert told.peak_bytes == peak
        assert told.total_bytes > peak


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(data=2, pipe=2), Layout(pipe=2, width=2)], ids=str)
def test_with_replicas_and_tiles(layout: Layout, live: Callable[[], Any]) -> None:
    plan = Plan(layout=layout, pipeline=Pipeline(micro_batches=2), tiles=Tiles(fuse="never"))
    for peak, told in on_ranks(plan, live):
        assert told.peak_bytes == pytest.approx(peak, rel=0.05)
        assert told.buckets_bytes > 0


def test_a_rank_of_many_from_one_process() -> None:
    net = small()
    before = copy.deepcopy(net.state_dict())
    plan = Plan(layout=Layout(pipe=4), pipeline=Pipeline("gpipe", 8))
    images = torch.empty(64, 3, 2048, 2048, device="meta")
    classes = torch.empty(64, dtype=torch.long, device="meta")
    first, last = (
        predicted_in_stages(net, plan, rank, inputs=images, targets=classes, loss=LOSS)
        for rank in (0, 3)
    )
    assert first.batch_bytes == 4 * images.numel() and last.batch_bytes == 8 * 64
    assert first.peak_bytes > 64 * 2048 * 2048 * 8 * 4  # all of them, what one layer makes
    held = {name: (type(t), t.device.type) for name, t in net.named_parameters()}
    assert set(held.values()) == {(nn.Parameter, "cpu")}
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_what_cannot_be_told() -> None:
    with pytest.raises(PlanError, match="has no rank 2: choose one of 0 to 1"):
        predicted_in_stages(small(), Plan(layout=Layout(pipe=2)), 2, inputs=X, targets=Y, loss=LOSS)
