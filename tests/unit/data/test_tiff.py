"""TIFF files of all layouts, written and read in windows; what is read, and what is not."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.data import loader
from fivefold.data.tiff import TiffImages
from fivefold.data.windows import Box
from fivefold.errors import DataError
from fivefold.mesh import Part, part_of
from fivefold.plan import Layout, Plan

tifffile = pytest.importorskip("tifffile")
RNG = np.random.default_rng(5)
RGB = {"photometric": "rgb"}


def pixels(*shape: int, dtype: str = "u1") -> np.ndarray:
    return RNG.integers(0, 250, shape).astype(dtype)


def write(path: Path, array: np.ndarray, **options: Any) -> Path:
    tifffile.imwrite(path, array, **options)
    return path


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "back", "torch_dtype"),
    [
        ((97, 75), "u2", {}, (1, 97, 75), torch.int32),
        ((97, 75), ">u2", {"byteorder": ">"}, (1, 97, 75), torch.int32),
        ((97, 75, 3), "u1", {**RGB, "tile": (16, 32), "compression": "zlib"}, (3, 97, 75), torch.uint8),
        ((97, 75, 3), "u1", {**RGB, "rowsperstrip": 8, "compression": "lzw"}, (3, 97, 75), torch.uint8),
        ((3, 97, 75), "u1", {**RGB, "planarconfig": "separate"}, (3, 97, 75), torch.uint8),
        ((5, 97, 75), "f4", {"photometric": "minisblack"}, (5, 97, 75), torch.float32),
    ],
)  # fmt: skip
def test_a_window_is_the_crop_of_the_whole(  # noqa: PLR0917
    tmp_path: Path, shape: Any, dtype: str, options: Any, back: Any, torch_dtype: Any
) -> None:
    array = pixels(*shape, dtype=dtype)
    data = TiffImages([write(tmp_path / "a.tif", array, **options)])
    whole = data[0]
    assert (len(data), tuple(whole.shape), whole.dtype) == (1, back, torch_dtype)
    expected = array if shape[-1] != 3 else array.transpose(2, 0, 1)
    assert np.array_equal(whole.numpy().reshape(expected.shape), expected)
    box = Box(data.sizes(0), (range(31, 64), range(37, 75)))
    assert torch.equal(data.window(0, box), whole[:, 31:64, 37:75])


def test_volumes_have_a_depth(tmp_path: Path) -> None:
    plain, channels = pixels(5, 33, 31, dtype="u2"), pixels(5, 2, 33, 31, dtype="u2")
    files = [write(tmp_path / "plain.tif", plain, photometric="minisblack", tile=(16, 16))]
    files.append(write(tmp_path / "imagej.tif", channels, imagej=True, metadata={"axes": "ZCYX"}))
    data = TiffImages(files, dims=3)
    assert [data.sizes(n) for n in range(2)] == [(5, 33, 31)] * 2
    assert np.array_equal(data[0].numpy(), plain[None])
    assert np.array_equal(data[1].numpy(), channels.transpose(1, 0, 2, 3))
    box = Box((5, 33, 31), (range(2, 5), range(16), range(15, 31)))
    assert torch.equal(data.window(1, box), data[1][:, 2:, :16, 15:])


def test_targets_are_labels_or_images_of_a_size_of_their_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.tif", pixels(20, 30)) for n in range(2)]
    maps = [write(tmp_path / f"map{n}.tif", pixels(10, 15)) for n in range(2)]
    labelled = TiffImages(files, [3, 4], transform=torch.Tensor.float)
    assert labelled[1][1] == 4
    assert labelled[1][0].dtype == torch.float32
    assert labelled.sizes(0) == ((20, 30), None)
    mapped = TiffImages(files, maps)
    assert mapped.sizes(0) == ((20, 30), (10, 15))
    image, classes = mapped[0]
    assert (tuple(image.shape), tuple(classes.shape)) == ((1, 20, 30), (10, 15))
    assert classes.dtype == torch.int64
    with pytest.raises(DataError, match="2 images and 1 targets"):
        TiffImages(files, [3])


def test_only_the_tiles_that_a_window_touches_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.tif", pixels(130, 110), tile=(32, 32), compression="zlib")
    data = TiffImages([file])
    decoded: list[tuple[int, ...]] = []
    decode = tifffile.TiffPage.decode.func  # type: ignore[attr-defined]

    def watched(page: Any) -> Any:
        inner = decode(page)

        def one(*args: Any, **options: Any) -> Any:
            segment = inner(*args, **options)
            decoded.append(segment[1])
            return segment

        return one

    monkeypatch.setattr(tifffile.TiffPage, "decode", property(watched))
    data.window(0, Box((130, 110), (range(65, 130), range(55))))
    assert len(decoded) == 3 * 2, "rows 64 to 130 in tiles of 32, columns 0 to 55"


@dataclass(frozen=True)
class Place:
    """What the loader asks a mesh for: one of two columns."""

    column: int
    plan: Plan = field(default_factory=Plan)
    layout: Layout = field(default_factory=lambda: Layout(width=2))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def share(self, n: int) -> range:
        return range(n)

    def coordinate(self, axis: str) -> int:
        return self.column if axis == "width" else 0


def test_worker_processes_read_tiles(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{n}.tif", pixels(41, 37), tile=(16, 16), compression="zlib")
        for n in range(3)
    ]
    whole = torch.stack([TiffImages(files)[n] for n in range(3)])
    tiles: list[torch.Tensor] = []
    for column in range(2):
        place: Any = Place(column)
        with loader(TiffImages(files), place, batch_size=3, shuffle=False, workers=1) as data:
            tiles.extend(data)
    assert part_of(tiles[1]) == Part((3, 1, 41, 37), (0, 0, 0, 18))
    assert torch.equal(torch.cat(tiles, dim=-1), whole)


def test_a_file_without_compression_is_mapped_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TiffImages([write(tmp_path / "a.tif", pixels(130, 110, dtype="u2"))])
    mapped: list[tuple[int, ...]] = []
    memmap = np.memmap

    def counted(*args: Any) -> Any:
        mapped.append(args[-1])
        return memmap(*args)

    monkeypatch.setattr(np, "memmap", counted)
    data.window(0, Box((130, 110), (range(65, 130), range(55))))
    assert mapped == [(130, 110)]


def test_what_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is no file"):
        TiffImages([tmp_path / "none.tif"])
    (tmp_path / "text.tif").write_text("no picture at all")
    with pytest.raises(DataError, match=r"text\.tif is damaged or no TIFF file"):
        TiffImages([tmp_path / "text.tif"])
    file = write(tmp_path / "a.tif", pixels(5, 2, 33, 31), photometric="minisblack")
    with pytest.raises(DataError, match=r"no image of 2 dims .* choose dims=2 or dims=3"):
        TiffImages([file])
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DataError, match=r'tifffile is needed.*pip install "fivefold\[images\]"'):
        TiffImages([file], dims=3)
