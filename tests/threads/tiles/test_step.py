"""Steps of training in tiles through the public API, by the measure of `fivefold verify`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.plan import Layout
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks

LAYOUTS = [
    Layout(height=2, width=2),
    Layout(height=3),
    Layout(width=2),
    Layout(data=2, width=2),
    Layout(data=3, height=2),
]


def segmenter() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 4, 3, padding=1),
    )  # fmt: skip


def classes(n: int) -> Tensor:
    targets = torch.randint(0, 4, (n, 10, 8))
    targets[:, 3] = -100
    return targets


def judged(
    net: nn.Module,
    layout: Layout,
    loss: Callable[..., Any],
    targets: Callable[[int], Any],
    samples: int,
    *,
    dtype: torch.dtype = torch.float64,
) -> Report:
    torch.manual_seed(2)
    batches = [(torch.randn(samples, 3, 37, 29), targets(samples)) for _ in range(2)]

    def check(mesh: Mesh) -> Report:
        return verify(
            lambda: copy.deepcopy(net),
            mesh,
            loss=loss,
            batch=batches.__getitem__,
            steps=2,
            dtype=dtype,
        )

    return run_ranks(layout, check, timeout_s=60)[0]


def expect_exact(report: Report) -> None:
    assert report.passed, (report.verdict(), report.notes, report.worst)
    assert report.replicas.difference == 0


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_uneven_tiles_with_weights_and_ignored_pixels(layout: Layout) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]))
    expect_exact(judged(segmenter(), layout, loss, classes, 2))


@pytest.mark.parametrize(
    "loss",
    [nn.L1Loss(), nn.MSELoss(reduction="sum"), nn.KLDivLoss(reduction="batchmean")],
    ids=repr,
)
def test_losses_of_pixels(loss: nn.Module) -> None:
    layout = Layout(data=2, width=2)
    expect_exact(judged(segmenter(), layout, loss, lambda n: torch.rand(n, 4, 10, 8), 3))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = segmenter(), nn.Linear(4 * 80, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"map": y, "vector": self.head(y.flatten(1))}


class HeadsLoss(nn.Module):
    def forward(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        pixels = nn.functional.cross_entropy(outputs["map"], targets)
        return pixels + outputs["vector"].square().mean()


@pytest.mark.filterwarnings("ignore:the loss", "ignore:HeadsLoss", "ignore:flatten")
def test_a_loss_of_ones_own_over_a_dict() -> None:
    for layout in (Layout(height=2), Layout(data=2, width=2)):
        expect_exact(judged(TwoHeads(), layout, HeadsLoss(), classes, 3))


def test_float32_is_as_good_as_one_process() -> None:
    report = judged(
        segmenter(),
        Layout(height=2, width=2),
        nn.CrossEntropyLoss(),
        classes,
        2,
        dtype=torch.float32,
    )
    assert report.passed, report.verdict()


def test_eval_gives_tiles_that_say_where_they_belong() -> None:
    net = segmenter().eval()
    x = torch.randn(2, 3, 37, 29)
    whole = net(x)

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(net), mesh)
        model.eval()
        with torch.no_grad():
            tile = model(model.shard(x))
        part = part_of(tile)
        assert part is not None
        assert part.shape == whole.shape
        box = tuple(slice(o, o + n) for o, n in zip(part.origin, tile.shape, strict=True))
        torch.testing.assert_close(tile, whole[box])

    run_ranks(Layout(height=2, width=2), check)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].mean() * x


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 3, 1))
    net[0].register_full_backward_hook(print)
    return net


@pytest.mark.parametrize(
    ("net", "shape", "says"),
    [
        (
            Branches(),
            (1, 3, 8, 8),
            r"the net \(test_step\.py:145\) depends on the numbers .* torch\.where",
        ),
        (
            nn.Sequential(Branches()),
            (1, 3, 8, 8),
            r"module '0' \(test_step\.py:145\) depends on the numbers",
        ),
        (
            Looks(),
            (1, 3, 8, 8),
            r"the net \(test_step\.py:150\) has a result whose shape depends on numbers",
        ),
        (hooked(), (1, 3, 8, 8), r"module '0' has a hook of its backward"),
        (nn.Conv2d(3, 3, 1), (1, 3, 1, 8), r"has 1 pixels along its height \(dim 2\), too few"),
    ],
)
def test_what_cannot_be_computed_in_tiles_is_told(
    net: nn.Module, shape: tuple[int, ...], says: str
) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=says):
            ff.parallelize(copy.deepcopy(net), mesh, example=torch.empty(shape, device="meta"))

    run_ranks(Layout(height=2), check)


def test_a_batch_that_does_not_say_what_it_is_part_of_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(nn.Conv2d(3, 3, 1), mesh)
        with pytest.raises(UsageError, match=r"which tile of which image .* model\.shard"):
            model(torch.randn(2, 3, 4, 8))

    run_ranks(Layout(height=2), check)


def test_training_flags_and_shapes_that_change_are_planned_anew() -> None:
    """Frozen statistics after a step, and another size of image: each equals the plain net."""
    net = segmenter().double()
    torch.manual_seed(4)
    images = [torch.randn(2, 3, n, 29, dtype=torch.float64) for n in (37, 37, 41)]

    def after(model: nn.Module, run: Callable[[Tensor], Any]) -> list[Tensor]:
        for number, image in enumerate(images):
            model.get_submodule("1").train(number == 0)
            run(image)
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = copy.deepcopy(net)
    wanted = after(plain, lambda image: plain(image).square().mean().backward())

    def check(mesh: Mesh) -> None:
        mine = copy.deepcopy(net)
        model = ff.parallelize(mine, mesh, loss=nn.MSELoss())

        def step(image: Tensor) -> None:
            rows = (image.shape[2] + 3) // 4
            model.step(*model.shard(image, torch.zeros(2, 4, rows, 8, dtype=torch.float64)))

        for got, right in zip(after(mine, step), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-12)

    run_ranks(Layout(height=2, width=2), check)
