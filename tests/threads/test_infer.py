"""Inference window by window, against nets on whole images."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.data.zarr import ZarrImages
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan
from fivefold.train import infer as module
from inferring import Images, computed, full_after, infer, made
from ranks import run_ranks

zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra images)")


@torch.no_grad()
def expect(
    net: nn.Module, images: Images, to: Path, then: Callable[[Any], Any] = lambda y: y
) -> None:
    net.eval()
    for index, image in enumerate(images.images):
        wanted = then(net(image[None]))
        wanted = wanted if isinstance(wanted, dict) else {"": wanted}
        for name, one in wanted.items():
            found = zarr.open_array(to / str(index) / name, mode="r")
            assert found.shape == tuple(one.shape[1:])
            np.testing.assert_allclose(found[...], one[0].numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shapes", "tile", "ranks"),
    [
        ("two", [(3, 37, 50), (3, 16, 90)], 16, 1),
        ("two", [(3, 37, 50), (3, 9, 7)], 8, 2),
        ("two", [(3, 37, 50)], 13, 1),
        ("unet", [(3, 64, 80), (3, 90, 130)], 32, 2),
        ("edsr_small", [(3, 37, 50)], 16, 2),
        ("unet3d", [(3, 16, 24, 32)], 16, 1),
    ],
)
def test_what_is_written_is_that_of_whole_images(
    name: str, shapes: list[tuple[int, ...]], tile: int, ranks: int, tmp_path: Path
) -> None:
    net, images = made(name), Images(*shapes)
    infer(net, images, tmp_path / "out", ranks, tile=tile)
    expect(net, images, tmp_path / "out")
    assert not (tmp_path / "out" / ".done").exists()


def test_windows_are_read_with_what_the_net_looks_at_and_no_more(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 1, 5, padding=2)).double()
    images = Images((3, 90, 80))
    infer(net, images, tmp_path / "out", tile=16)
    assert images.most == 22 * 22
    expect(net, images, tmp_path / "out")


def test_classes_instead_of_logits(tmp_path: Path) -> None:
    def then(y: dict[str, Tensor]) -> Tensor:
        return y["half"].argmax(1).byte()

    net, images = made("two"), Images((3, 37, 50))
    infer(net, images, tmp_path / "out", tile=16, then=then)
    expect(net, images, tmp_path / "out", then)
    assert zarr.open_array(tmp_path / "out" / "0", mode="r").dtype == np.uint8


def test_results_can_be_read_as_a_data_set(tmp_path: Path) -> None:
    store = zarr.open_group(tmp_path / "in", mode="w")
    pixels = np.random.default_rng(1).normal(size=(2, 3, 40, 50))
    store.create_array("images", shape=pixels.shape, chunks=(1, 3, 16, 16), dtype="float64")[
        ...
    ] = pixels
    net = nn.Conv2d(3, 2, 3, padding=1).double()
    infer(net, ZarrImages(tmp_path / "in"), tmp_path / "out", tile=16)
    found = zarr.open_array(tmp_path / "out" / "1", mode="r")[...]
    wanted = net(torch.from_numpy(pixels[1:]))[0].detach()
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-12)


def test_a_run_that_ended_early_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images = made("two"), Images((3, 37, 50), (3, 20, 20))
    with full_after(5):
        infer(net, images, tmp_path / "out", tile=16)
    windows = computed(monkeypatch)
    with pytest.raises(UsageError, match="holds outputs of other weights, images or windows"):
        infer(net, images, tmp_path / "out", tile=8)
    infer(net, images, tmp_path / "out", tile=16)
    assert len(windows) == 2 * 3 + 1 - 5
    expect(net, images, tmp_path / "out")
    infer(net, images, tmp_path / "out", tile=16)
    assert len(windows) == 2 * 3 + 1 - 5, "all of it is there"


def chosen(channels: Any) -> Callable[[Tensor], Tensor]:
    return lambda y: y[:, channels]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda y: y > 0.5, lambda y: y > 0.6),
        (lambda y: y[:, [0, 1]], lambda y: y[:, [0, 2]]),
        (chosen([0, 1]), chosen([0, 2])),
        (chosen(torch.tensor([0, 1])), chosen(torch.tensor([0, 2]))),
        (functools.partial(torch.softmax, dim=1), functools.partial(torch.softmax, dim=2)),
        (nn.Softmax(1), nn.Softmax(2)),
        (lambda y: [z + 1 for z in y], lambda y: [z + 2 for z in y]),
        (torch.sigmoid, torch.tanh),
        (torch.relu, None),
    ],
    ids=["number", "list", "held", "tensor", "partial", "module", "within", "torch", "none"],
)  # fmt: skip
def test_what_else_is_written_is_another_run(one: Any, other: Any) -> None:
    assert module._told(one) != module._told(other)
    assert module._told(one) == module._told(copy.deepcopy(one))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Pairs(Images):
    """Images with a label each, all of one size."""

    def sizes(self, index: int) -> Any:
        return super().sizes(index), None

    def window(self, index: int, box: Any) -> Any:
        return super().window(index, box[0]), index


def test_images_of_one_size_are_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begin = list[module._Plan](), module._Plan.__init__

    def noted(self: module._Plan, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(module._Plan, "__init__", noted)
    net, images = nn.Conv2d(3, 2, 3, padding=1).double(), Pairs((3, 40, 50), (3, 40, 50))
    infer(net, images, tmp_path / "out", tile=16)
    expect(net, images, tmp_path / "out")
    assert len(made) == 1


class Sequences:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3, 8, 8)


@pytest.mark.filterwarnings("ignore:randn_like in the net")
@pytest.mark.parametrize(
    ("net", "images", "more", "says"),
    [
        (nn.Conv2d(3, 2, 3), Sequences(), {}, "which Sequences does not offer: use TiffImages"),
        (nn.Conv2d(3, 2, 3), Images((3, 9, 9)), {"tile": 0}, "at least one pixel"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
            Images((3, 40, 40)),
            {},
            "group_norm in '1' looks at more of the image .*tiles.turns",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            Images((3, 40, 40)),
            {},
            "looks at more of the image",
        ),
        (nn.Conv2d(3, 2, 3), Images((3, 40, 40)), {"then": lambda y: y[..., 1:]}, "then returned"),
        (Noise(), Images((3, 40, 40)), {}, "draws random numbers"),
        (
            nn.Conv2d(3, 2, 3),
            Images((3, 40, 40)),
            {"then": lambda y: y.bfloat16()},
            "arrays cannot hold torch.bfloat16",
        ),
        (nn.Conv2d(3, 2, 3), Images((3, 40, 40)), {"then": lambda _: 1}, "the net returns int"),
    ],
    ids=["no windows", "no tile", "norm", "classifier", "pixels", "noise", "bfloat16", "no tensor"],
)  # fmt: skip
def test_what_cannot_be_inferred_is_told(
    net: nn.Module, images: Any, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        infer(net.double(), images, tmp_path / "out", **{"tile": 16, **more})


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of mine")
    with pytest.raises(UsageError, match="is there already: name another folder, or remove it"):
        infer(nn.Conv2d(3, 2, 3).double(), Images((3, 9, 9)), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_windows_of_several_ranks_may_share_chunks(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 2, 4, stride=4).double()
    infer(net, Images((3, 90, 90)), tmp_path / "out", 3, tile=10)
    expect(net, Images((3, 90, 90)), tmp_path / "out")


def test_a_net_in_parts_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, 8, 8)

    def check(mesh: Mesh) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        with pytest.raises(UsageError, match="ranks divide the parameters"):
            ff.infer(parallelize(net, mesh, example=x), Images((3, 8, 8)), tmp_path / "out")

    run_ranks(2, check, plan=Plan(layout=Layout(pipe=2)))
