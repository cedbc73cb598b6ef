"""Replicas that divide parameters among them compute what one process computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.parallel import gathering
from fivefold.plan import Layout, Pipeline
from sharding import Dropped, plan_of
from small_models import batch_of, judged, loss_of, net_of


@pytest.fixture
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the smallest nets are units of their own."""
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)


@pytest.mark.long
@pytest.mark.usefixtures("_layer_by_layer")
@pytest.mark.parametrize(
    ("name", "shard", "ranks", "samples"),
    [
        ("resnet20", "optimizer", 2, 3),
        ("resnet20", "parameters", 2, 3),
        pytest.param("resnet20", "parameters", 3, 4, marks=pytest.mark.slow),
        pytest.param("unet", "optimizer", 2, 3, marks=pytest.mark.slow),
        ("unet", "parameters", 2, 3),
    ],
)
def test_real_models_are_exact(name: str, shard: str, ranks: int, samples: int) -> None:
    plan = plan_of(shard, ranks)
    report = judged(net_of(name), plan, 3, loss_of(name), lambda: batch_of(name, samples))
    assert report.passed, report.verdict()
    assert report.replicas.difference == 0


@pytest.mark.long(every=8)
@pytest.mark.usefixtures("_layer_by_layer")
@pytest.mark.parametrize(
    ("shard", "layout", "samples", "pipeline"),
    [
        ("optimizer", Layout(data=3), 2, Pipeline()),  # one rank has nothing to do
        ("parameters", Layout(data=3), 2, Pipeline()),
        ("parameters", Layout(data=2), 5, Pipeline()),
        ("optimizer", Layout(data=2, height=2), 3, Pipeline()),
        ("optimizer", Layout(data=2, pipe=2), 7, Pipeline("1f1b")),
        ("optimizer", Layout(data=2, pipe=2), 5, Pipeline("zero-bubble")),
        ("optimizer", Layout(data=2, pipe=2), 6, Pipeline("interleaved", stages_per_rank=2)),
        pytest.param(
            "optimizer",
            Layout(data=2, pipe=2, height=2),
            5,
            Pipeline("gpipe", 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_all_layouts_are_exact(
    shard: str, layout: Layout, samples: int, pipeline: Pipeline
) -> None:
    torch.manual_seed(4)
    plan = plan_of(shard, layout, pipeline=pipeline)
    report = judged(
        Dropped(),
        plan,
        3,
        nn.CrossEntropyLoss(),
        lambda: (torch.randn(samples, 3, 9, 7), torch.randint(0, 4, (samples,))),
    )
    assert report.passed, report.verdict()
    assert report.replicas.difference == 0
