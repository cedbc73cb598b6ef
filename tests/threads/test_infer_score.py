"""Scores that are summed window by window, against those of whole images."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fivefold.data.tiff import TiffImages
from fivefold.data.windows import Box
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan
from fivefold.train import infer as inference
from inferring import Images, computed, full_after, made
from ranks import run_ranks

zarr: Any = pytest.importorskip("zarr", reason="zarr is not installed (extra images)")
Score = Callable[[Any, Tensor], Tensor]


class Pairs(Images):
    """Images and maps of classes, which may be of another size."""

    def __init__(self, *shapes: tuple[int, ...], factor: int = 1) -> None:
        super().__init__(*shapes)
        sizes = [[n * factor for n in shape[1:]] for shape in shapes]
        self.targets = [torch.randint(0, 2, size) for size in sizes]

    def sizes(self, index: int) -> Any:
        return super().sizes(index), tuple(self.targets[index].shape)

    def window(self, index: int, box: Any) -> Any:
        return super().window(index, box[0]), self.targets[index][box[1].slices]


def confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.bincount((2 * targets + outputs[:, :2].argmax(1)).flatten(), minlength=4).double()


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = outputs.sub_(targets[:, None])  # changes what it is given
    return torch.stack([errors.square().sum(), torch.tensor(float(errors.numel())).to(errors)])


def of_whole(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return torch.cat([confusion(outputs["whole"], targets), squared(outputs["whole"], targets)])


def infer(
    net: nn.Module, images: Any, to: Path | None, score: Score | None, ranks: int = 1, **more: Any
) -> Tensor:
    found = list[Any]()

    def check(mesh: Mesh) -> None:
        sums = inference.infer(
            parallelize(copy.deepcopy(net), mesh), images, to, score=score, **more
        )
        found.append(sums)

    run_ranks(Layout(data=ranks), check, plan=Plan(layout=Layout(data=ranks)))
    for other in found if score is not None else ():
        assert torch.equal(other, found[0])
    return found[0]


@torch.no_grad()
def expect(net: nn.Module, images: Pairs, score: Score) -> Tensor:
    pairs = zip(images.images, images.targets, strict=True)
    total = sum(score(net.eval()(image[None]), target[None]) for image, target in pairs)
    assert isinstance(total, Tensor)
    return total


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_targets_that_nobody_asks_for_are_given_boxes(tmp_path: Path) -> None:
    images, net = Pairs((3, 20, 9)), made("edsr_small")
    assert not len(infer(net, images, tmp_path / "out.zarr", None, tile=16))
    found = zarr.open_array(tmp_path / "out.zarr" / "0", mode="r")[...]
    with torch.no_grad():
        whole = net.eval()(images.images[0][None])[0]
    torch.testing.assert_close(torch.from_numpy(found), whole)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("name", "shapes", "score", "ranks"),
    [
        ("two", [(3, 37, 50), (3, 20, 21)], of_whole, 2),
        ("unet", [(3, 64, 80)], confusion, 1),
        ("edsr_small", [(3, 20, 9)], squared, 3),
    ],
)
def test_sums_are_those_of_whole_images(
    name: str, shapes: list[tuple[int, ...]], score: Score, ranks: int, written: bool
) -> None:
    net = made(name)
    images = Pairs(*shapes, factor=2 if name == "edsr_small" else 1)
    wanted = expect(net, images, score)
    with tempfile.TemporaryDirectory() as folder:
        to, tile = Path(folder) / "out.zarr", 32 if name == "unet" else 16
        close(infer(net, images, to if written else None, score, ranks, tile=tile), wanted)
        assert to.exists() == written


@pytest.mark.parametrize("to", ["out.zarr", "out.tif"])
@pytest.mark.parametrize("after", [0, 3, 5])
def test_a_run_that_goes_on_counts_each_window_once(
    to: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images = nn.Conv2d(3, 2, 5, padding=2).double(), Pairs((3, 37, 50))
    wanted = expect(net, images, confusion)
    with full_after(after):
        infer(net, images, tmp_path / to, confusion, tile=16)
    with pytest.raises(UsageError, match="holds outputs of other weights"):
        infer(net, images, tmp_path / to, None, tile=16)
    windows = computed(monkeypatch)
    close(infer(net, images, tmp_path / to, confusion, 2, tile=16), wanted)
    assert len(windows) == 6 - after
    close(infer(net, images, tmp_path / to, confusion, tile=16), wanted)
    assert len(windows) == 6 - after, "all of it is there, and so are the sums"


def test_what_is_written_is_not_changed_by_a_score(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    net, images = nn.Conv2d(3, 1, 5, padding=2).double(), Pairs((3, 37, 50))
    infer(net, images, tmp_path / "out", squared, tile=16)
    wanted = net(images.images[0][None])[0].detach().numpy()
    np.testing.assert_allclose(zarr.open_array(tmp_path / "out/0", mode="r")[...], wanted, 1e-10)


def test_targets_of_files(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    numbers = np.random.default_rng(3)
    pixels = numbers.normal(size=(37, 50, 3))
    classes = numbers.integers(0, 2, (37, 50), dtype=np.uint8)
    tifffile.imwrite(
        tmp_path / "x.tif", pixels, photometric="minisblack", planarconfig="contig", tile=(16, 16)
    )
    tifffile.imwrite(tmp_path / "y.tif", classes, tile=(16, 16))
    images = TiffImages([tmp_path / "x.tif"], [tmp_path / "y.tif"])
    net = nn.Conv2d(3, 2, 3, padding=1).double()
    image, target = images[0]
    wanted = confusion(net(image[None]).detach(), target[None])
    close(infer(net, images, None, confusion, 2, tile=16), wanted)


def test_without_a_score_there_are_no_sums(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 2, 3).double()
    assert infer(net, Images((3, 20, 20)), tmp_path / "out", None).shape == (0,)


class Labels(Images):
    def sizes(self, index: int) -> Any:
        return super().sizes(index), None


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()[None]


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    return nn.functional.avg_pool2d(outputs, 3, 1, 1).square().sum()[None]


def of_any_number(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    return torch.bincount(
        (outputs.shape[-2:].numel() * outputs[:, 0]).flatten().abs().long()
    ).double()


def without_dims(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.sum()


@pytest.mark.parametrize(
    ("images", "score", "more", "says"),
    [
        (Pairs((3, 40, 40)), mean, {}, "score has to return sums over pixels"),
        (Pairs((3, 40, 40)), smooth, {}, "score has to return sums over pixels"),
        (Pairs((3, 40, 40)), of_any_number, {}, "score has to return sums over pixels"),
        (Pairs((3, 40, 40)), without_dims, {}, "score returned torch.float64"),
        (Images((3, 40, 40)), confusion, {}, "sample 0 is not .image, target., both images"),
        (Labels((3, 40, 40)), confusion, {}, "sample 0 is not .image, target., both images"),
        (Pairs((3, 40, 40), factor=2), confusion, {}, r"has \(40, 40\) pixels, and the target \(80, 80\)"),
        (Pairs((3, 40, 40)), None, {}, "with to=None nothing is written: give a score, and no then"),
        (Pairs((3, 40, 40)), confusion, {"then": torch.relu}, "with to=None nothing is written"),
    ],
    ids=["mean", "smooth", "length", "number", "images", "labels", "sizes", "no score", "then"],
)  # fmt: skip
def test_what_cannot_be_scored_is_told(
    images: Any, score: Score | None, more: dict[str, Any], says: str
) -> None:
    net = nn.Conv2d(3, 2, 3, padding=1).double()
    with pytest.raises(UsageError, match=says):
        infer(net, images, None, score, tile=16, **more)


def test_a_window_of_one_pixel() -> None:
    net, images = nn.Conv2d(3, 2, 1).double(), Pairs((3, 1, 1))
    close(infer(net, images, None, confusion, 2), expect(net, images, confusion))


def test_boxes_of_targets_are_given(tmp_path: Path) -> None:
    """Also while the plan is made: a data set is told which pixels, and never left to guess."""

    class Strict(Pairs):
        def window(self, index: int, box: Any) -> Any:
            assert all(isinstance(one, Box) for one in box)
            return super().window(index, box)

    net = nn.Conv2d(3, 2, 3, padding=1).double()
    infer(net, Strict((3, 20, 20)), tmp_path / "out", confusion, tile=16)
