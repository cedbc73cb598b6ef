"""The handwritten digits inside scikit-learn."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from fivefold.data.digits import Digits
from fivefold.errors import DataError


def test_a_sample_is_an_image_and_its_digit() -> None:
    data = Digits()
    image, digit = data[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert type(digit) is int
    assert data.classes == tuple("0123456789")
    assert data.images.min() == 0
    assert data.images.max() == 1


def test_the_split_is_complete_and_in_proportion() -> None:
    train, test = Digits(train=True), Digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    everything = Counter(map(bytes, (load_digits().images / 16).astype("<f4")))
    read = Counter(image.numpy().tobytes() for part in (train, test) for image in part.images)
    assert read == everything
    held_out, all_digits = Counter(test.labels), Counter(train.labels) + Counter(test.labels)
    for digit in range(10):
        assert held_out[digit] == pytest.approx(all_digits[digit] * 360 / 1797, abs=1)


def test_the_split_never_changes() -> None:
    """Accuracies are compared over years: the same 360 images are held out for good."""
    digest = hashlib.sha256(Digits(train=False).images.numpy().tobytes()).hexdigest()
    assert digest[:16] == "6b374c043afde9a7"


def test_the_transform_sees_the_image_and_cannot_damage_the_data() -> None:
    data = Digits(transform=lambda image: image.zero_() + 2)
    assert (data[5][0] == 2).all()
    assert data.images.max() == 1


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        DataError, match=r'scikit-learn is needed.*pip install "fivefold\[recipes\]"'
    ):
        Digits()


def test_without_its_file_the_error_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sklearn.py").touch()
    monkeypatch.delitem(sys.modules, "sklearn")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"digits\.csv\.gz is missing: this scikit-learn came"):
        Digits()
