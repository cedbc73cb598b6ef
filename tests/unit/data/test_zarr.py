"""zarr stores, written and read in windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.data.windows import Box
from fivefold.data.zarr import ZarrImages
from fivefold.errors import DataError

zarr = pytest.importorskip("zarr")
RNG = np.random.default_rng(6)


def store(path: Path, **arrays: tuple[np.ndarray, tuple[int, ...]]) -> Path:
    group = zarr.open_group(path, mode="w")
    for name, (array, chunks) in arrays.items():
        group.create_array(name, data=array, chunks=chunks)
    return path


def test_images_and_targets_of_every_kind(tmp_path: Path) -> None:
    images = RNG.random((3, 2, 41, 37)).astype("f4")
    pictures = RNG.random((3, 1, 82, 74)).astype("f4")
    classes = RNG.integers(0, 4, (3, 41, 37)).astype("u1")
    labels = np.array([4, 5, 6])
    root = store(
        tmp_path / "a.zarr",
        images=(images, (1, 2, 16, 16)),
        pictures=(pictures, (1, 1, 32, 32)),
        classes=(classes, (1, 16, 16)),
        labels=(labels, (3,)),
    )
    assert np.array_equal(ZarrImages(root)[2].numpy(), images[2])
    data = ZarrImages(root, targets="pictures")
    assert data.sizes(1) == ((41, 37), (82, 74))
    boxes = (Box((41, 37), (range(20), range(18, 37))), Box((82, 74), (range(41), range(37, 74))))
    image, picture = data.window(1, boxes)
    assert np.array_equal(image.numpy(), images[1, :, :20, 18:])
    assert np.array_equal(picture.numpy(), pictures[1, :, :41, 37:])
    image, target = ZarrImages(root, targets="classes")[0]
    assert target.dtype == torch.int64
    assert np.array_equal(target.numpy(), classes[0])
    labelled = ZarrImages(root, targets="labels")
    assert (labelled[1][1], labelled.sizes(1)) == (5, ((41, 37), None))


def test_volumes(tmp_path: Path) -> None:
    images = RNG.random((2, 1, 7, 9, 11))
    data = ZarrImages(store(tmp_path / "v.zarr", images=(images, (1, 1, 3, 3, 3))))
    box = Box(data.sizes(1), (range(3, 7), range(4), range(5, 11)))
    assert np.array_equal(data.window(1, box).numpy(), images[1, :, 3:, :4, 5:])


def test_only_the_chunks_that_a_window_touches_are_read(tmp_path: Path) -> None:
    images = RNG.random((2, 1, 64, 64)).astype("f4")
    root = store(tmp_path / "a.zarr", images=(images, (1, 1, 16, 16)))
    data = ZarrImages(root)
    kept = {"c/1/0/2/3", "c/1/0/3/3"}
    for chunk in (root / "images" / "c").rglob("*"):
        if chunk.is_file() and str(chunk.relative_to(root / "images")) not in kept:
            chunk.write_bytes(b"damaged")
    window = data.window(1, Box((64, 64), (range(32, 64), range(48, 64))))
    assert np.array_equal(window.numpy(), images[1, :, 32:, 48:])
    with pytest.raises(Exception, match=r".+"):
        data.window(1, Box((64, 64), (range(31, 64), range(48, 64))))


def test_what_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array: Any = np.zeros((2, 8))
    root = store(tmp_path / "a.zarr", flat=(array, (1, 8)))
    with pytest.raises(DataError, match="there is no zarr array 'images' in"):
        ZarrImages(root)
    with pytest.raises(DataError, match=r"has shape \(2, 8\); images are N x C x H x W"):
        ZarrImages(root, "flat")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(DataError, match=r'zarr is needed.*pip install "fivefold\[images\]"'):
        ZarrImages(root)


@pytest.mark.long
def test_a_process_ends_in_silence_although_the_thread_of_zarr_is_late(tmp_path: Path) -> None:
    root = store(tmp_path / "a.zarr", images=(RNG.random((1, 1, 8, 8)), (1, 1, 8, 8)))
    code = (
        "import sys, time; from fivefold.data.zarr import ZarrImages; from zarr.core import sync; "
        "ZarrImages(sys.argv[1])[0]; sync.loop[0].call_soon_threadsafe(time.sleep, 0.6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
