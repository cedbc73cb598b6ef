"""Windows without files: which transforms are refused, data sets around data sets, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fivefold.data import BatchId
from fivefold.data.images import Transformed
from fivefold.data.source import Source
from fivefold.data.tiling import TileCollate, TiledSamples, noted
from fivefold.data.transforms import Compose, Normalise, RandomFlip, ToFloat
from fivefold.data.windows import Box, check_transform, on_windows, windows_of
from fivefold.errors import UsageError
from fivefold.mesh import Part, part_of

AXES = {"height": (3, 1), "width": (2, 1)}
BOX = Box((11, 7), (range(3, 7), range(3, 7)))


class Ramps:
    """Samples (image 1 x 11 x 7, name, map of twice the size)."""

    def __init__(self, count: int = 4, grow: int = 0) -> None:
        self.count, self.grow = count, grow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        size, _, larger = self.sizes(index)
        return self.window(index, (Box.whole(size), None, Box.whole(larger)))

    def sizes(self, index: int) -> Any:
        grown = index * self.grow
        return (11 + grown, 7), None, (22, 14)

    def window(self, index: int, boxes: Any) -> Any:
        image, _, larger = boxes
        return (
            ramp(image.size)[None][image.slices],
            f"image {index}",
            ramp(larger.size)[larger.slices],
        )


def ramp(size: tuple[int, ...]) -> Tensor:
    return torch.arange(size[0] * size[1]).view(size)


def test_a_tile_is_cut_by_the_rule_of_ownership_of_each_image() -> None:
    (image, name, larger), boxes = TiledSamples(Ramps(), AXES)[2]
    whole, _, whole_larger = Ramps()[2]
    assert torch.equal(image, whole[:, 3:7, 3:7])
    assert torch.equal(larger, whole_larger[7:14, 7:14])
    assert name == "image 2"
    assert boxes == (BOX, None, Box((22, 14), (range(7, 14), range(7, 14))))
    assert BOX.shape == (4, 4)


def test_parts_are_noted_on_a_batch_even_without_samples() -> None:
    source = Source(
        TiledSamples(Ramps(), AXES), batch_size=3, collate=TileCollate(None), shuffle=False
    )
    made = source.produce(BatchId(0, 0), range(1, 3))
    (image, names, larger) = noted(*made, samples=3, start=1)
    assert image.shape == (2, 1, 4, 4)
    assert names == ["image 1", "image 2"]
    assert part_of(image) == Part((3, 1, 11, 7), (1, 0, 3, 3))
    assert part_of(larger) == Part((3, 22, 14), (1, 7, 7))
    image, names, larger = noted(*source.produce(BatchId(0, 0), range(2, 2)), samples=3, start=2)
    assert (tuple(image.shape), names, tuple(larger.shape)) == ((0, 1, 4, 4), [], (0, 7, 7))
    assert part_of(larger) == Part((3, 22, 14), (2, 7, 7))


def test_an_image_with_too_few_dims_for_the_layout_is_whole() -> None:
    (image, *_), boxes = TiledSamples(Ramps(), {"depth": (2, 1)})[0]
    assert image.shape == (1, 11, 7)
    assert boxes[0] == Box.whole((11, 7))


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (RandomFlip(), r"RandomFlip\(chance=0.5\)"),
        (Compose(ToFloat(), RandomFlip(0.25)), r"RandomFlip\(chance=0.25\)"),
        (torch.fft.fft2, "fft_fft2"),
    ],
)
def test_a_transform_that_needs_the_whole_image_is_refused_by_name(
    transform: Any, name: str
) -> None:
    with pytest.raises(UsageError, match=f"the transform {name} may need .*on_windows"):
        check_transform(transform)


def test_transforms_of_single_pixels_are_taken() -> None:
    for transform in (None, Compose(ToFloat(), Normalise((0.5,), (0.1,))), on_windows(torch.exp)):
        check_transform(transform)
    assert on_windows(torch.neg)(torch.ones(2)).tolist() == [-1, -1]


def test_subsets_and_transforms_in_front_of_a_data_set_hand_its_windows_on() -> None:
    dataset = Transformed(
        Transformed(Subset(Ramps(), [3, 1]), on_windows(torch.neg)), RandomFlip(0.0)
    )  # type: ignore[arg-type]
    windows = windows_of(dataset)
    assert windows is not None
    image, name, _ = windows.window(0, (BOX, None, BOX))
    whole, *_ = Ramps()[3]
    assert image.abs().equal(whole[BOX.slices])
    assert (len(windows), name, windows[1][1]) == (2, "image 3", "image 1")
    with pytest.raises(UsageError, match="the transform RandomFlip"):
        check_transform(getattr(windows, "transform", None))
    assert windows_of(Subset(TensorDataset(torch.ones(3)), [1])) is None


class Wrong(Ramps):
    def window(self, index: int, boxes: Any) -> Any:
        image, *rest = super().window(index, boxes)
        return (image[..., 1:], *rest) if index else (image, rest)


def test_mistakes_of_a_data_set_are_told() -> None:
    tiles = TiledSamples(Wrong(), AXES)
    with pytest.raises(
        UsageError, match=r"window\(0\) and sizes\(0\) of Wrong differ in structure"
    ):
        tiles[0]
    with pytest.raises(UsageError, match=r"shape \(1, 4, 3\) for a box of \(4, 4\) pixels"):
        tiles[1]
    with pytest.raises(UsageError, match="7 along width, too few for width=9: use width=7 or less"):
        TiledSamples(Ramps(), {"width": (9, 0)})[0]
    growing = TiledSamples(Ramps(grow=1), AXES)
    with pytest.raises(
        UsageError, match=r"differ in size .*: 11 x 7, 12 x 7 pixels; use batch_size=1"
    ):
        TileCollate(None)([growing[0], growing[1]])
    made = TileCollate(lambda samples: samples[0][0])([growing[0]])
    with pytest.raises(UsageError, match="collate changed the structure"):
        noted(*made, samples=1, start=0)
