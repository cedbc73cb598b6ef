"""Activations computed again in backward: the same numbers, no message more, no buffer updated twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel
from fivefold.plan import Layout, Plan, Provenance
from fivefold.trace import Tag, recording
from joined import Images, expect_exact
from ranks import run_ranks
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 5, 2, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4)
            )
            for _ in range(5)
        )
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = first = self.first(x)
        for block in self.blocks:
            x = self.drop(block(x)) + first
        return [x, self.head(x.mean((2, 3)))]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("segments", [1, 3, 100])
def test_recomputing_changes_no_number(segments: int, layout: Layout) -> None:
    expect_tiles(Deep(), (2, 3, 29, 23), layout, fuse=2, recompute=segments)


def test_frozen_batch_norm_is_not_disturbed() -> None:
    net = Deep()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    expect_tiles(net, (2, 3, 29, 23), Layout(width=2), recompute=3)


class Flat(nn.Module):
    """Norms of vectors whose channels, once pixels, are divided among tiles."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d((2, 4))
        self.norm, self.track = nn.BatchNorm1d(16, momentum=None), nn.BatchNorm1d(16, affine=False)
        self.instances = nn.InstanceNorm1d(16, affine=True, track_running_stats=True)
        self.head, self.checkpointed = nn.Linear(16, 3), checkpointed

    def middle(self, x: Tensor) -> Tensor:
        y = self.track(torch.tanh(self.norm(x)))
        return torch.tanh(self.instances(torch.stack([y, x * y, y**2], 2)).sum(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.pool(self.first(x)).flatten(1)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        return [x, self.head(x)]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [Layout(height=2, width=2), Layout(height=2)], ids=str)
@pytest.mark.parametrize("recompute", [0, 1, 100])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("samples", [2, 3])
def test_norms_of_divided_channels_count_once(
    samples: int, checkpointed: bool, recompute: int, layout: Layout
) -> None:
    expect_tiles(Flat(checkpointed), (samples, 3, 9, 11), layout, recompute=recompute)


@pytest.mark.parametrize("layout", [Layout(data=2, width=2), Layout(pipe=2, width=2)], ids=str)
def test_norms_of_divided_channels_join_replicas(layout: Layout) -> None:
    def middle(net: Any, h: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(h, (2, 2)).flatten(1)
        return h * net.norm(pooled).sum(1)[:, None, None, None]

    expect_exact(layout, middle, lambda: {"norm": nn.BatchNorm1d(16)}, Images)


@pytest.mark.parametrize("layout", [Layout(width=2), Layout(pipe=2)], ids=str)
def test_running_statistics_of_a_sample_without_its_dim_are_refused(layout: Layout) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)
            self.norm = nn.InstanceNorm2d(4, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.stack([self.norm(image) for image in self.first(x)]))

    def taught(model: ParallelModel, x: Tensor) -> None:
        model.step(*model.shard(x, torch.randn(2, 2, 7, 7)))

    def check(mesh: Mesh) -> None:
        x = torch.randn(2, 2, 9, 9)
        with pytest.raises(UsageError, match="give it a batch of one"):
            taught(ff.parallelize(Single(), mesh, example=x, loss=nn.MSELoss()), x)

    run_ranks(layout, check, plan=Plan(layout=layout))


class Changing(nn.Module):
    """A weight that its forward changes before it is used."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last.weight.data.mul_(0.5)
        return self.last(self.first(x).square()).square()


@pytest.mark.parametrize("trained", [False, True])
def test_what_a_forward_changes_is_not_changed_twice(trained: bool) -> None:
    net, reference = Changing(trained).double(), Changing(trained).double()
    reference.load_state_dict(net.state_dict())
    x, y = torch.randn(2, 3, 8, 8).double(), torch.randn(2, 4, 8, 8).double()
    loss = nn.MSELoss()
    loss(reference(x), y).backward()

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        for own, other in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own, other)
            torch.testing.assert_close(own.grad, other.grad)

    plan = Plan(layout=Layout(width=2)).replace({"memory.recompute": "all"}, Provenance())
    if not trained:
        run_ranks(Layout(width=2), check, plan=plan)
        return
    with pytest.raises(UsageError, match=r"the forward changes last\.weight, which is trained"):
        run_ranks(Layout(width=2), check, plan=plan)


def test_nothing_is_sent_again() -> None:
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)))
    )
    x, y = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)

    def sent(mesh: Mesh) -> dict[Tag, int]:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss(), example=x)
        with recording() as recorder:
            model.step(*model.shard(x, y))
        return {tag: recorder.stats[tag].count for tag in (Tag.HALO, Tag.BATCH_NORM)}

    counts = [
        run_ranks(Layout(width=2), sent, plan=plan)
        for plan in (
            Plan(layout=Layout(width=2)).replace(
                {"tiles.fuse": "never", "memory.recompute": n}, Provenance()
            )
            for n in (0, 3)
        )
    ]
    assert counts[0] == counts[1]
    assert counts[0][0][Tag.HALO] > 0
