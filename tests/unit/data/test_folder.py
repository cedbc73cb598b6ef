"""Directories of real pictures, good and bad."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fivefold.data.folder import TEST_FRACTION, ImageFolder
from fivefold.errors import DataError

RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def paint(
    path: Path,
    colour: tuple[int, ...] | int = RED,
    size: tuple[int, int] = (16, 16),
    mode: str = "RGB",
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two classes, splits of the user's own."""
    for part, count in (("train", 3), ("test", 1)):
        for number in range(count):
            paint(tmp_path / part / "cat" / f"{number}.png", RED)
            paint(tmp_path / part / "dog" / "brown" / f"{number}.JPG", BLUE)
    return tmp_path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Two classes of 40 pictures, no splits."""
    for number in range(40):
        paint(tmp_path / "cat" / f"{number}.png", RED)
        paint(tmp_path / "dog" / f"{number}.png", BLUE)
    return tmp_path


def test_folders_are_classes(split: Path) -> None:
    train, test = ImageFolder(split, size=8), ImageFolder(split, train=False, size=8)
    assert train.classes == test.classes == ("cat", "dog")
    assert train.files == [f"train/cat/{n}.png" for n in range(3)] + [
        f"train/dog/brown/{n}.JPG" for n in range(3)
    ]
    assert train.labels == [0, 0, 0, 1, 1, 1]
    assert len(test) == 2
    image, label = train[0]
    assert (image.shape, image.dtype, label) == ((3, 8, 8), torch.uint8, 0)
    assert image[:, 3, 3].tolist() == list(RED)


def test_val_is_read_before_test(split: Path) -> None:
    paint(split / "val" / "cat" / "a.png")
    paint(split / "val" / "dog" / "b.png")
    assert ImageFolder(split, train=False).files == ["val/cat/a.png", "val/dog/b.png"]


def test_a_collection_is_split_by_name_and_a_new_file_moves_no_other(collection: Path) -> None:
    train, test = ImageFolder(collection), ImageFolder(collection, train=False)
    assert not set(train.files) & set(test.files)
    assert len(train) + len(test) == 80
    assert len(test) / 80 == pytest.approx(TEST_FRACTION, abs=0.1)
    for number in range(40, 60):
        paint(collection / "cat" / f"{number}.png")
    assert set(test.files) < set(ImageFolder(collection, train=False).files)
    assert set(train.files) < set(ImageFolder(collection).files)


@pytest.mark.parametrize(
    ("size", "mode", "colour"),
    [
        ((40, 16), "RGB", GREEN),
        ((16, 41), "RGB", GREEN),
        ((3, 5), "RGB", GREEN),
        ((9, 9), "RGBA", (*GREEN, 128)),
        ((20, 10), "P", 0),
        ((20, 10), "1", 1),
    ],
)
def test_any_size_and_mode_becomes_a_square_of_colours(
    split: Path, size: tuple[int, int], mode: str, colour: tuple[int, ...] | int
) -> None:
    paint(split / "train" / "cat" / "0.png", colour, size, mode)
    image, _ = ImageFolder(split, size=16)[0]
    assert image.shape == (3, 16, 16)
    assert image.float().std(dim=(1, 2)).max() == 0
    if colour is GREEN:
        assert image[:, 0, 0].tolist() == list(GREEN)


def test_the_middle_of_a_picture_is_kept(split: Path) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 250
    Image.fromarray(pixels).save(split / "train" / "cat" / "0.png")
    image, _ = ImageFolder(split, size=10)[0]
    assert (image == 250).all()


def test_the_transform_sees_the_image(split: Path) -> None:
    image, _ = ImageFolder(split, size=8, transform=lambda x: x.float() * 2)[0]
    assert image.max() == 400


def test_hidden_and_other_files_are_left_alone(split: Path) -> None:
    paint(split / "train" / ".thumbnails" / "0.png")
    paint(split / "train" / "cat" / ".trash" / "0.png")
    (split / "train" / "cat" / "._0.png").write_bytes(b"")
    (split / "train" / "cat" / "notes.txt").write_text("not a picture")
    assert len(ImageFolder(split)) == 6


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"there is no folder .*/none; expected .*<class>/<name>\.jpg"
    ):
        ImageFolder(tmp_path / "none")
    with pytest.raises(DataError, match="has no folders of classes"):
        ImageFolder(tmp_path)
    paint(tmp_path / "cat" / "0.png")
    with pytest.raises(DataError, match="has only the class cat"):
        ImageFolder(tmp_path)
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match=r"no picture in .*/dog: .*\.jpg"):
        ImageFolder(tmp_path)


def test_splits_that_do_not_match(split: Path) -> None:
    paint(split / "test" / "bird" / "0.png")
    with pytest.raises(DataError, match=r"test has classes that .*train has not: bird"):
        ImageFolder(split, train=False)
    (split / "test").rename(split / "elsewhere")
    assert len(ImageFolder(split)) == 6
    with pytest.raises(DataError, match="has a folder train/ but neither val/ nor test/"):
        ImageFolder(split, train=False)


def test_too_few_pictures_to_split(tmp_path: Path) -> None:
    """One picture per class: whichever side of the split each falls on, some side lacks it."""
    messages = set()
    for number in range(20):
        root = tmp_path / str(number)
        paint(root / "cat" / f"{number}.png")
        paint(root / "dog" / f"{number}.png")
        for train in (True, False):
            try:
                ImageFolder(root, train=train)
            except DataError as error:
                messages.add(str(error).replace(str(root), "ROOT"))
    assert messages == {
        f"ROOT holds too few pictures: with a fifth held out, none {lacking}; add some, or make "
        "ROOT/train and ROOT/val yourself"
        for lacking in (
            "of cat is left to train with",
            "of dog is left to train with",
            "of cat, dog is left to train with",
            "is left to test with",
        )
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"1\.png is empty"),
        (b"<html>404 not found</html>", r"1\.png is not a picture: it begins with b'<htm'"),
        (
            b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
            r"1\.png cannot be decoded, it is truncated or damaged",
        ),
    ],
)
def test_what_is_no_picture_is_found_at_the_start(
    split: Path, content: bytes, message: str
) -> None:
    (split / "train" / "cat" / "1.png").write_bytes(content)
    with pytest.raises(DataError, match=message):
        ImageFolder(split)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif"])
def test_a_truncated_picture_is_found_at_the_start(split: Path, suffix: str) -> None:
    path = noise(split / "train" / "cat" / f"t{suffix}")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=rf"t\{suffix} cannot be decoded, it is truncated"):
        ImageFolder(split)


@pytest.mark.parametrize("suffix", [".bmp", ".tif", ".webp", ".ppm"])
def test_a_truncated_picture_of_another_format_is_found_when_it_is_read(
    split: Path, suffix: str
) -> None:
    path = noise(split / "train" / "cat" / f"t{suffix}")
    path.write_bytes(path.read_bytes()[:-300])
    data = ImageFolder(split)
    index = data.files.index(f"train/cat/t{suffix}")
    with pytest.raises(DataError, match=rf"t\{suffix} cannot be decoded, it is truncated"):
        data[index]


def noise(path: Path) -> Path:
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_bytes_after_a_whole_picture_do_no_harm(split: Path) -> None:
    path = noise(split / "train" / "cat" / "camera.jpg")
    path.write_bytes(path.read_bytes() + b"\0" * 20)
    assert len(ImageFolder(split)) == 7


def test_a_picture_that_vanished_is_named(split: Path) -> None:
    data = ImageFolder(split)
    (split / "train" / "cat" / "0.png").unlink()
    with pytest.raises(DataError, match=r"cat/0\.png"):
        data[0]


def test_more_than_8_bits_are_not_clipped_in_silence(split: Path) -> None:
    deep = np.full((8, 8), 1000, dtype=np.uint16)
    Image.fromarray(deep).save(split / "train" / "cat" / "0.png")
    with pytest.raises(DataError, match=r"0\.png has more than 8 bits per channel"):
        ImageFolder(split)[0]


def test_without_pillow_the_error_says_what_to_install(
    split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ImageFolder(split)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r'Pillow is needed.*pip install "fivefold\[recipes\]"'):
        data[0]
