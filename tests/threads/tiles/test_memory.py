"""Predicted memory of a tile rank against what is counted on the ranks themselves, byte by byte."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.model import ParallelModel, parallelize
from fivefold.parallel.program.memory import Predicted, predicted
from fivefold.plan import Layout, Memory, Plan, Tiles
from ranks import run_ranks

TILES = Path(__file__).resolve().parents[3] / "benchmarks" / "tiles"
"""where memory is counted from outside"""


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    monkeypatch.syspath_prepend(str(TILES))
    yield __import__("live").Live
    sys.modules.pop("live", None)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential(
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        )  # fmt: skip
        self.tail = nn.Conv2d(8, 5, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        # The two lie differently: one is moved, and made again in backward, the other one is kept.
        return self.tail((self.body(x) + 1) * (x + 2))


LOSS = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]), ignore_index=3)
X, Y = torch.randn(2, 3, 120, 92), torch.randint(0, 5, (2, 60, 46))


class Noting:
    """Stands where a scaler of gradients does: between forward and backward."""

    def __init__(self, count: Any) -> None:
        self._count, self.saved = count, 0

    def scale(self, loss: Tensor) -> Tensor:
        self.saved = self._count.bytes
        return loss


def counted(model: ParallelModel, x: Tensor, y: Tensor, live: Callable[[], Any]) -> tuple[int, int]:
    """Saved and most alive in a step, the first apart.

    The least of three: threads of gloo let go of what they have sent a moment after their operation ends.
    """
    x, y = model.shard(x, y)
    for _ in range(3):  # in two of them the net is recorded again, on tensors that count here
        model.step(x, y)
    found: list[tuple[int, int]] = []
    for _ in range(3):
        with live() as count:
            noting = Noting(count)
            model.step(x, y, noting)
        found.append((noting.saved, count.peak_bytes))
    saved, most = zip(*found, strict=True)
    return min(saved), min(most)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "fuse", "recompute"),
    [
        (Layout(width=2), "never", 0),
        (Layout(width=2), "2", 3),
        (Layout(height=2), "never", 3),
        (Layout(data=2, height=2), "2", 0),
    ],
    ids=str,
)
def test_it_is_what_the_ranks_need(
    layout: Layout, fuse: str, recompute: int, live: Callable[[], Any]
) -> None:
    plan = Plan(layout=layout, tiles=Tiles(fuse=fuse), memory=Memory(recompute=recompute))
    net, x, y = Small(), X[: layout.data], Y[: layout.data]

    def check(mesh: Mesh) -> tuple[int, int]:
        return counted(parallelize(copy.deepcopy(net), mesh, loss=LOSS), x, y, live)

    for rank, counts in enumerate(run_ranks(layout, check, plan=plan)):
        have = predicted(net, plan, rank, inputs=x.to("meta"), targets=y.to("meta"), loss=LOSS)
        assert (have.saved_bytes, have.peak_bytes) == counts


@pytest.mark.parametrize("layout", [Layout(width=2), Layout(data=2, height=2)], ids=str)
def test_outputs_alone(layout: Layout, live: Callable[[], Any]) -> None:
    plan = Plan(layout=layout, tiles=Tiles(fuse="2"))
    net, x = Small().eval(), X[: layout.data]

    @torch.no_grad()
    def check(mesh: Mesh) -> int:
        model = parallelize(copy.deepcopy(net), mesh)
        mine, most = model.shard(x), list[int]()
        for number in range(6):
            with live() as count:
                model(mine)
            most += [count.peak_bytes] if number > 2 else []
        return min(most)

    for rank, most in enumerate(run_ranks(layout, check, plan=plan)):
        have = predicted(net, plan, rank, inputs=x.to("meta"))
        assert (have.saved_bytes, have.gradients_bytes, have.buckets_bytes) == (0, 0, 0)
        assert have.peak_bytes == most
        assert "gradients" not in str(have) and "most alive" in str(have)


class Narrow(nn.Module):
    """Tiles of one pixel, and parameters that nothing uses: both make a step look at numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 2, 2), nn.BatchNorm2d(4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def test_what_a_step_asks_of_numbers_is_answered(live: Callable[[], Any]) -> None:
    x, y = torch.randn(1, 3, 2, 4), torch.randn(1, 4, 1, 2)

    def check(mesh: Mesh) -> tuple[tuple[int, int], Predicted]:
        model = parallelize(Narrow(), mesh, loss=nn.L1Loss())
        return counted(model, x, y, live), model.memory(x, y)

    for rank, (counts, have) in enumerate(run_ranks(Layout(width=2), check)):
        assert (have.saved_bytes, have.peak_bytes) == counts
        assert have.rank == rank


def test_a_large_image_from_one_process() -> None:
    net, image = Small(), torch.empty(1, 3, 16384, 16384, device="meta")
    plan = Plan(layout=Layout(height=8, width=8), tiles=Tiles(fuse="never"))
    classes = torch.empty(1, 8192, 8192, dtype=torch.int64, device="meta")
    corner, edge, middle = (
        predicted(net, plan, rank, inputs=image, targets=classes, loss=LOSS) for rank in (0, 3, 27)
    )
    assert corner.saved_bytes < edge.saved_bytes < middle.saved_bytes < 1.01 * corner.saved_bytes
    assert middle.batch_bytes == 4 * 3 * 2048**2 + 8 * 8192**2  # targets keep their pixels
    assert middle.parameters_bytes == sum(4 * t.numel() for t in net.state_dict().values()) + 8
    assert "rank 27 of 64 (height=8,width=8), predicted:\n" in str(middle)


def test_the_net_and_other_threads_are_left_alone() -> None:
    net, called = Small(), list[Tensor]()

    def call_modules() -> None:
        plain = nn.Sequential(nn.ReLU())
        called.extend(plain(torch.ones(2)) for _ in range(2))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        loading = threading.Thread(target=call_modules)
        loading.start()
        loading.join()
        return (outputs - targets).abs().sum()

    before = copy.deepcopy(net.state_dict())
    target = torch.randn(2, 5, 60, 46)
    with pytest.warns(UserWarning, match="the loss"):
        predicted(net, Plan(layout=Layout(width=2)), 0, inputs=X, targets=target, loss=loss)
    assert [y.tolist() for y in called] == [[1.0, 1.0]] * 2
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in net.parameters())


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


@pytest.mark.filterwarnings("ignore:the loss")
def test_a_loss_that_gathers_replicas(live: Callable[[], Any]) -> None:
    layout, y = Layout(data=2, height=2), torch.randn(2, 5, 60, 46)

    def check(mesh: Mesh) -> tuple[tuple[int, int], Predicted]:
        model = parallelize(Small(), mesh, loss=summed)
        return counted(model, X, y, live), model.memory(*model.shard(X, y))

    for counts, have in run_ranks(layout, check):
        assert (have.saved_bytes, have.peak_bytes) == counts


@pytest.mark.filterwarnings("ignore:the loss")
def test_what_cannot_be_told() -> None:
    def selected(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.masked_select(targets > 0).sum()

    told = partial(predicted, Small(), inputs=X, targets=torch.randn(2, 5, 60, 46))
    with pytest.raises(UsageError, match="cannot be told beforehand: run a step and measure"):
        told(Plan(layout=Layout(width=2)), 0, loss=selected)
    with pytest.raises(
        PlanError, match="not for data=2: set height, width or depth, and leave pipe"
    ):
        told(Plan(layout=Layout(data=2)), 0, loss=LOSS)
