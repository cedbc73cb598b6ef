"""Augmentations, and that they are seeded by whoever seeds the global generators."""

from __future__ import annotations

import random

import pytest
import torch

from fivefold.data.images import Transformed
from fivefold.data.transforms import (
    Compose,
    Normalise,
    RandomCrop,
    RandomFlip,
    RandomShift,
    ToFloat,
)
from fivefold.errors import UsageError
from streams import Numbers, fingerprint, make

IMAGE = torch.arange(1, 49, dtype=torch.uint8).view(3, 4, 4)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    padded = torch.nn.functional.pad(IMAGE, (2, 2, 2, 2))
    windows = {
        padded[:, t : t + 4, k : k + 4].numpy().tobytes() for t in range(5) for k in range(5)
    }
    crops = {RandomCrop(4, padding=2)(IMAGE).numpy().tobytes() for _ in range(500)}
    assert crops == windows


def test_a_crop_that_is_larger_than_the_image_is_refused() -> None:
    assert RandomCrop(6, padding=1)(IMAGE).shape == (3, 6, 6)
    with pytest.raises(UsageError, match="cannot crop 7 x 7 from an image of 4 x 4 padded by 1"):
        RandomCrop(7, padding=1)(IMAGE)


def test_a_shift_moves_zeros_in() -> None:
    padded = torch.nn.functional.pad(IMAGE, (1, 1, 1, 1))
    windows = {
        padded[:, t : t + 4, k : k + 4].numpy().tobytes() for t in range(3) for k in range(3)
    }
    shifts = {RandomShift(1)(IMAGE).numpy().tobytes() for _ in range(200)}
    assert shifts == windows


def test_a_shift_beyond_the_image_leaves_zeros() -> None:
    assert {RandomShift(9)(IMAGE).shape for _ in range(50)} == {IMAGE.shape}


def test_a_flip_swaps_left_and_right() -> None:
    assert torch.equal(RandomFlip(1.0)(IMAGE), IMAGE.flip(2))
    assert torch.equal(RandomFlip(0.0)(IMAGE), IMAGE)
    flipped = sum(not torch.equal(RandomFlip()(IMAGE), IMAGE) for _ in range(1000))
    assert 430 < flipped < 570


def test_bytes_become_floats_and_floats_stay() -> None:
    image = torch.tensor([[[0, 51, 255]]], dtype=torch.uint8)
    assert ToFloat()(image).tolist() == [[[0.0, pytest.approx(0.2), 1.0]]]
    assert ToFloat()(torch.ones(1, 1, 1)).item() == 1.0


def test_normalising_works_on_channels() -> None:
    image = Normalise((1.0, 2.0), (2.0, 4.0))(torch.ones(2, 1, 1))
    assert image.flatten().tolist() == [0.0, -0.25]


def test_steps_run_in_order() -> None:
    steps = Compose(RandomShift(0), ToFloat(), Normalise((0.0,), (0.5,)))
    assert torch.allclose(steps(IMAGE), IMAGE / 255 * 2)
    assert repr(steps) == "Compose(RandomShift(pixels=0), ToFloat(), Normalise([0.0], [0.5]))"


def test_no_step_changes_its_input() -> None:
    before = IMAGE.clone()
    Compose(RandomCrop(4, 1), RandomShift(1), RandomFlip(1.0), ToFloat())(IMAGE)
    assert torch.equal(IMAGE, before)


def test_the_loader_seeds_what_they_draw() -> None:
    class Images(Numbers):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str]:
            return IMAGE, index, "kept"

    data = Transformed(Images(12), Compose(RandomCrop(4, padding=2), RandomFlip()))
    streams = {fingerprint(make(data, batch_size=12, seed=seed)) for seed in (1, 1, 2)}
    assert len(streams) == 2
    (batch,) = make(data, batch_size=12, shuffle=False)
    assert len({image.numpy().tobytes() for image in batch[0]}) > 6
    assert batch[1].tolist() == list(range(12))
    assert batch[2] == ["kept"] * 12
