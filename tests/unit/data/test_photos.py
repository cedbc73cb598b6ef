"""The photographs inside scikit-learn and scikit-image."""

from __future__ import annotations

import socket
import sys

import pytest
import torch
from torch import Tensor

from fivefold.data.photos import Photos, enlarged, shrunk
from fivefold.data.transforms import Compose, RandomCrop, ToFloat
from fivefold.errors import DataError, UsageError


def photos(size: int, train: bool = False) -> Photos:
    transform = Compose(RandomCrop(2 * size), ToFloat())
    return Photos(train=train, size=size, transform=transform)


@pytest.mark.parametrize("size", [24, 33])
@pytest.mark.parametrize("train", [True, False])
def test_a_sample_is_a_small_picture_and_the_picture(size: int, train: bool) -> None:
    data = photos(size, train)
    for index in (0, len(data) - 1):
        small, picture = data[index]
        assert small.shape == (3, size, size)
        assert picture.shape == (3, 2 * size, 2 * size)
        assert torch.equal(small, shrunk(picture))
        assert 0 <= picture.min() <= picture.max() <= 1


def test_what_is_held_out_is_never_trained_on() -> None:
    train, test = photos(24, train=True), photos(24)
    parts = list({id(window): window for window in train.windows}.values())
    # Three quarters of the columns of a 427 x 640 photograph, for one; the grid is in the last quarter.
    assert [tuple(p.shape[1:]) for p in parts] == [(427, 480), (427, 480), (1411, 1059), (872, 750)]
    assert len(test) == 2 * (8 * 3) + 29 * 7 + 18 * 5
    assert len(train) == 2 * (8 * 10) + 29 * 22 + 18 * 15
    everything = photos(24, train=True).windows[0]
    assert not any(torch.equal(test.windows[0], c) for c in everything.unfold(2, 48, 48).unbind(2))


def test_a_run_draws_from_the_whole_part_and_leaves_it_as_it_is() -> None:
    data = photos(24, train=True)
    before = data.windows[0].clone()
    assert len({bytes(data[0][1].numpy()) for _ in range(5)}) == 5
    assert torch.equal(data.windows[0], before)


def test_photographs_too_small_are_left_out() -> None:
    assert {w.shape[1] for w in photos(100).windows} == {200}
    with pytest.raises(UsageError, match="--size 500 needs parts of 1000 x 1000 pixels for 2 x"):
        photos(500)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(photos(33)) > 100


def test_shrinking_keeps_what_is_smooth_and_enlarging_gives_it_back() -> None:
    rows, columns = torch.meshgrid(torch.arange(38.0), torch.arange(62.0), indexing="ij")
    wave: Tensor = torch.stack([torch.sin(rows / 9), torch.cos(columns / 7), rows / 38])
    inner = (slice(None), slice(6, -6), slice(6, -6))
    assert torch.allclose(enlarged(shrunk(wave))[inner], wave[inner], atol=0.02)
    noise = torch.rand(3, 38, 62)
    assert shrunk(noise).std() < 0.7 * noise.std(), "high frequencies are taken out first"


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn.datasets", "scikit-learn"), ("skimage", "scikit-image")]
)
def test_without_a_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf'{package} is needed.*pip install "fivefold\[recipes\]"'):
        photos(24)
