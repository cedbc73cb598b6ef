"""The loader of windows on real meshes with tile axes, and training with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.data.images import Transformed
from fivefold.data.transforms import RandomFlip
from fivefold.data.windows import Box, on_windows
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, owned, part_of
from fivefold.plan import Layout
from fivefold.train import Summary, fit, warmup_cosine
from fivefold.train.task import PICTURES
from ranks import run_ranks

LAYOUTS = [Layout(height=2, width=2), Layout(width=3), Layout(data=2, height=3)]


class Fields:
    """Samples (image 3 x 23 x 17, target), float64; remembers how many pixels it was asked for at once."""

    def __init__(self, target: Callable[[Tensor], Tensor], count: int = 5) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(count, 3, 23, 17, generator=generator, dtype=torch.float64)
        self.targets = target(self.images)
        self.most = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]

    def sizes(self, _: int) -> Any:
        size = tuple(self.targets.shape[-2:]) if self.targets.dim() > 1 else None
        return (23, 17), size

    def window(self, index: int, boxes: tuple[Box, Box | None]) -> tuple[Tensor, Tensor]:
        box, other = boxes
        self.most = max(self.most, box.shape[0] * box.shape[1])
        target = self.targets[index]
        return self.images[index][box.slices], target if other is None else target[other.slices]


def doubled(images: Tensor) -> Tensor:
    return nn.functional.interpolate(images, scale_factor=2, mode="bicubic")


def halved(images: Tensor) -> Tensor:
    """Classes of a net with stride 2, some of them ignored."""
    return (images.sum(1)[:, ::2, ::2] * 2.9).long() % 4 - 1


def label(images: Tensor) -> Tensor:
    return torch.arange(len(images)) % 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_windows_are_crops_of_the_whole(layout: Layout) -> None:
    def read(mesh: Mesh) -> None:
        fields = Fields(doubled)
        whole = ff.loader([*map(fields.__getitem__, range(5))], mesh, batch_size=3, seed=2)
        tiles = ff.loader(fields, mesh, batch_size=3, seed=2)
        for batch, windows in zip(whole, tiles, strict=True):
            for image, tile in zip(batch, windows, strict=True):
                part, box = part_of(image), []
                assert part is not None
                for axis, n in (("height", image.shape[2]), ("width", image.shape[3])):
                    box.append(owned(n, getattr(layout, axis), mesh.coordinate(axis)))
                rows, columns = box
                assert torch.equal(
                    tile, image[:, :, rows.start : rows.stop, columns.start : columns.stop]
                )
                origin = (part.origin[0], 0, rows.start, columns.start)
                assert part_of(tile) == Part(part.shape, origin)
        assert fields.most < 23 * 17

    run_ranks(layout, read)


def larger() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 12, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip


def segments() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 5, stride=2, padding=2), nn.Tanh(), nn.Conv2d(6, 4, 1))


def classes() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean().sqrt()


CASES = [
    (larger, doubled, nn.L1Loss()),
    (larger, doubled, own_loss),
    (segments, halved, nn.CrossEntropyLoss(ignore_index=-1)),
    (classes, label, nn.CrossEntropyLoss()),
]


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings("ignore:the loss")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=["pixels", "own", "map", "label"])
def test_training_on_windows_equals_one_process(case: Any, layout: Layout) -> None:
    build, target, loss = case
    torch.manual_seed(0)
    net = build().double()
    if net[-1].__class__ is nn.PixelShuffle:
        net[3] = nn.Conv2d(6, 12, 3, padding=1).double()

    def train(mesh: Mesh) -> dict[str, Tensor]:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in ff.loader(Fields(target), mesh, batch_size=4, seed=2):  # 4 samples, then 1
            model.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    (alone,) = run_ranks(Layout(), train)
    for weights in run_ranks(layout, train):
        for name, expected in alone.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-10, atol=1e-12)


def test_validation_on_windows_equals_one_process() -> None:
    torch.manual_seed(0)
    net = larger().double()

    def train(mesh: Mesh) -> Summary:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=PICTURES.loss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = warmup_cosine(optimizer, steps=2, warmup=1)
        batches = ff.loader(Fields(doubled), mesh, batch_size=4)
        tests = ff.loader(Fields(doubled), mesh, batch_size=4, shuffle=False)
        return fit(
            model, optimizer, schedule, batches, tests, mesh=mesh, epochs=1, task=PICTURES
        )  # fmt: skip

    (alone,) = run_ranks(Layout(), train)
    for layout in LAYOUTS:
        for summary in run_ranks(layout, train):
            assert summary.psnr_db == pytest.approx(alone.psnr_db, abs=1e-9)


def brighter(image: Tensor) -> Tensor:
    return image * (0.5 + torch.rand(()))


def test_all_tiles_of_an_image_draw_the_same_and_flips_are_refused() -> None:
    def read(mesh: Mesh) -> list[Tensor]:
        with pytest.raises(UsageError, match="the transform RandomFlip"):
            ff.loader(Transformed(Fields(label), RandomFlip()), mesh, batch_size=3)
        dataset = Fields(label)
        dataset.images = torch.ones_like(dataset.images)
        bright = Transformed(dataset, on_windows(brighter))
        return [x for x, _ in ff.loader(bright, mesh, batch_size=5, seed=3)]

    first, *others = run_ranks(Layout(height=2, width=2), read)
    assert len(first[0][:, 0, 0, 0].unique()) == 5
    for other in others:
        assert torch.equal(other[0][:, 0, 0, 0], first[0][:, 0, 0, 0])


def test_a_flip_is_no_matter_where_images_are_whole() -> None:
    def read(mesh: Mesh) -> None:
        dataset = Transformed(Fields(label), RandomFlip())
        for x, _ in ff.loader(dataset, mesh, batch_size=2):
            assert x.shape[1:] == (3, 23, 17)

    run_ranks(Layout(data=2), read)
