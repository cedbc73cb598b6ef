"""Norms, masks and global means where replicas and tiles meet, one of them empty: by `fivefold verify`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan, Tiles
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks


class Net(nn.Module):
    """Squeeze and excitation, stochastic depth, dropout, and norms of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1),
            nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
            nn.GELU(),
            nn.Dropout2d(0.2),
        )
        self.body = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.Dropout(0.3)
        )
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.body(x)
        y = y * self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        x = x + y * y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(0.6).div_(0.6)
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [Layout(height=2, width=2), Layout(data=2, width=2), Layout(data=3, height=2)],
    ids=str,
)
def test_norms_and_masks_of_replicas_in_tiles(layout: Layout) -> None:
    torch.manual_seed(4)
    net = Net()
    batches = [(torch.randn(2, 3, 13, 11), torch.randint(0, 4, (2,))) for _ in range(2)]

    def check(mesh: Mesh) -> Report:
        return verify(
            lambda: copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss(), batch=batches.__getitem__, steps=2,
            dtype=torch.float64,
        )  # fmt: skip

    report = run_ranks(layout, check, timeout_s=60)[0]
    assert report.passed, (report.verdict(), report.notes, report.worst)
    assert report.replicas.difference == 0


@pytest.mark.long(every=8)
@pytest.mark.parametrize("fuse", ["1", "2", "never"])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_replicas_without_samples_whatever_shares_an_exchange(fuse: str, samples: int) -> None:
    layout, loss = Layout(data=3, height=2), nn.CrossEntropyLoss()
    torch.manual_seed(samples)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1)
    )
    batches = [
        (torch.randn(samples, 3, 10, 8), torch.randint(0, 4, (samples, 10, 8))) for _ in range(2)
    ]

    def check(mesh: Mesh) -> Report:
        build = lambda: copy.deepcopy(net)  # noqa: E731
        return verify(build, mesh, loss=loss, batch=batches.__getitem__, steps=2)

    plan = Plan(layout=layout, tiles=Tiles(fuse=fuse))
    report = run_ranks(layout, check, plan=plan, timeout_s=60)[0]
    assert report.passed, (report.verdict(), report.worst)
