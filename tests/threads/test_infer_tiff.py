"""Inference into a TIFF file, against nets on whole images."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fivefold.data.tiff import TiffImages
from fivefold.errors import UsageError
from fivefold.parallel.program.alone import AloneWindow
from fivefold.train import infer_store, infer_tiff
from inferring import Images, infer, made

pytest.importorskip("zarr", reason="zarr is not installed (extra images)")
tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed (extra images)")


@torch.no_grad()
def expect(net: nn.Module, images: Images, file: Path, then: Any = lambda y: y) -> None:
    wanted = then(net.eval()(images.images[0][None]))[0]
    found = TiffImages([file])[0]
    assert found.dtype == wanted.dtype
    wanted = wanted if wanted.dim() > 2 else wanted[None]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def classes(y: dict[str, Tensor]) -> Tensor:
    return y["whole"].argmax(1).byte()


def pixels(y: Tensor) -> Tensor:
    return (y * 40).clamp(0, 255).byte()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are told after every tile that the file is still being written."""
    monkeypatch.setattr(infer_tiff, "_SIGN_S", 0.0)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("name", "tile", "ranks", "then"),
    [
        ("edsr_small", 16, 2, lambda y: y),
        ("edsr_small", 16, 1, pixels),
        ("two", 13, 2, classes),
        ("two", 16, 1, lambda y: y["whole"][:, :1]),
    ],
    ids=["floats", "colours", "classes", "one channel"],
)
def test_a_tiff_file_is_that_of_the_whole_image(
    name: str, tile: int, ranks: int, then: Any, tmp_path: Path
) -> None:
    net, images = made(name), Images((3, 37, 51))
    infer(net, images, tmp_path / "out.tif", ranks, tile=tile, then=then)
    expect(net, images, tmp_path / "out.tif", then)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.is_bigtiff
        page = file.pages[0]
        assert page.is_tiled
        assert page.tilewidth % 16 == page.tilelength % 16 == 0
        assert page.photometric.name == ("RGB" if then is pixels else "MINISBLACK")


def test_a_row_of_pixels(tmp_path: Path) -> None:
    net, images = nn.Conv2d(3, 2, 1).double(), Images((3, 1, 40))
    infer(net, images, tmp_path / "out.tiff", tile=16)
    expect(net, images, tmp_path / "out.tiff")


@pytest.mark.parametrize("where", ["windows", "tiles", "renaming", "removal"])
def test_a_run_that_ended_early_is_gone_on_with(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images, file = made("edsr_small"), Images((3, 50, 50)), tmp_path / "out.tif"
    compute, counts = AloneWindow.compute, {"calls": 0, "computed": 0}
    owner, name = {
        "windows": (infer_store.OutputStore, "write"),
        "tiles": (infer_tiff.np, "pad"),
        "renaming": (infer_tiff.TiffStore, "_remove"),
        "removal": (infer_tiff.shutil, "rmtree"),
    }[where]
    function, before = getattr(owner, name), {"windows": 3, "tiles": 3, "renaming": 0, "removal": 1}

    def ends(*arguments: Any, **more: Any) -> Any:
        counts["calls"] += 1
        if counts["calls"] > before[where]:
            raise OSError("no space left on device")
        return function(*arguments, **more)

    def counted(self: AloneWindow, image: Tensor) -> Any:
        counts["computed"] += 1
        return compute(self, image)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, ends)
        with pytest.raises(OSError, match="no space"):
            infer(net, images, file, tile=16)
    assert file.exists() == (where in {"renaming", "removal"})
    monkeypatch.setattr(AloneWindow, "compute", counted)
    infer(net, images, file, tile=16)
    assert counts["computed"] == (6 if where == "windows" else 0)
    expect(net, images, file)
    written = file.stat().st_mtime_ns
    infer(net, images, file, tile=16)
    assert file.stat().st_mtime_ns == written, "all of it is there"
    expect(net, images, file)


def test_a_file_of_another_job_stays(tmp_path: Path) -> None:
    net, images, file = nn.Conv2d(3, 2, 3).double(), Images((3, 20, 20)), tmp_path / "out.tif"
    tifffile.imwrite(tmp_path / "mine.tif", np.zeros((4, 4), np.uint8), software="of mine")
    infer(net, images, file, tile=16)
    for path in (file, tmp_path / "mine.tif"):
        before = path.read_bytes()
        with pytest.raises(UsageError, match=f"{path.name} is there already: name another file"):
            infer(net, images, path, tile=8)
        assert path.read_bytes() == before
    (tmp_path / "text.tif").write_text("of mine")
    with pytest.raises(UsageError, match="is there already"):
        infer(net, images, tmp_path / "text.tif", tile=8)
    names = {"mine.tif", "out.tif", "text.tif"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_group_beside_the_file_that_is_not_ours_stays(tmp_path: Path) -> None:
    net, images = nn.Conv2d(3, 2, 3).double(), Images((3, 20, 20))
    infer(net, images, tmp_path / "out.tif.zarr", tile=16)
    with pytest.raises(UsageError, match=r"out.tif.zarr holds outputs of other weights"):
        infer(net, images, tmp_path / "out.tif", tile=16)


@pytest.mark.parametrize(
    ("net", "shapes", "then", "says"),
    [
        (nn.Conv2d(3, 2, 3), [(3, 9, 9), (3, 9, 9)], None, "holds one image, and the data set has 2"),
        (nn.Conv3d(3, 2, 3), [(3, 9, 9, 9)], None, "holds images of 2 dims"),
        (nn.Conv2d(3, 2, 3), [(3, 9, 9)], lambda y: (y, y), "holds one array, and the net returns 0, 1"),
        (nn.Conv2d(3, 2, 3), [(3, 9, 9)], lambda y: y[:, :, None], "holds one dim of channels"),
        (nn.Conv2d(3, 2, 3), [(3, 9, 9)], lambda y: y > 0, "holds numbers, which torch.bool is not"),
    ],
    ids=["images", "volume", "outputs", "dims", "bool"],
)  # fmt: skip
def test_what_a_tiff_file_cannot_hold_is_told(
    net: nn.Module, shapes: list[tuple[int, ...]], then: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"{says}.*name a zarr group, such as .*out.zarr"):
        infer(net.double(), Images(*shapes), tmp_path / "out.tif", tile=16, then=then)
    assert not [*tmp_path.iterdir()]


def test_no_more_than_some_tiles_are_held(tmp_path: Path) -> None:
    """While the file is written, of which the image has 256."""
    images, net = Images((3, 1024, 1024)), nn.Conv2d(3, 4, 1).double()
    convert, held = infer_tiff.TiffStore._convert, list[int]()

    def measured(self: Any, about: str) -> None:
        tracemalloc.start()
        try:
            convert(self, about)
            held.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_tiff.TiffStore, "_convert", measured)
        infer(net, images, tmp_path / "out.tif", tile=64)
    tile = 4 * 64 * 64 * 8
    assert tile < held[0] < 20 * tile
