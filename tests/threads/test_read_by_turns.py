"""Windows that are read as turns come to them, against one process on whole images."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.data.tiff import TiffImages
from fivefold.data.windows import Box, on_windows
from fivefold.data.zarr import ZarrImages
from fivefold.errors import DataWarning, UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.unread import Unread, pieces
from fivefold.parallel import ParallelModel
from fivefold.plan import Layout, Memory, Plan, Tiles
from ranks import run_ranks

SIZE = 125, 98


class Scans:
    """Images and maps of five samples, multiplied by a number that is drawn; notes how much was read."""

    def __init__(self, *, classes: bool, named: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randn(5, 3, *SIZE, generator=draw, dtype=torch.float64)
        self.maps = torch.randn(5, 3, *SIZE, generator=draw, dtype=torch.float64)
        if classes:
            self.maps = torch.randint(-1, 3, (5, *SIZE), generator=draw)
        self.classes, self.named, self.read = classes, named, list[int]()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.window(index, self._tree(Box.whole(SIZE), Box.whole(SIZE)))

    def sizes(self, index: int) -> Any:  # noqa: ARG002
        return self._tree(SIZE, SIZE)

    def window(self, index: int, boxes: Any) -> Any:
        image, target = boxes.values() if self.named else boxes
        self.read += [int(np.prod(box.shape)) for box in (image, target)]
        factor = 0.5 + torch.rand((), dtype=torch.float64)
        factor = factor * (1 + np.random.random())  # noqa: NPY002
        found = self.maps[index][target.slices]
        return self._tree(
            self.images[index][image.slices] * factor, found if self.classes else found * factor
        )

    def _tree(self, image: Any, target: Any) -> Any:
        return {"image": image, "target": target} if self.named else (image, target)


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 3, 3, padding=1),
    ).double()  # fmt: skip


def plan_of(disk: Path, layout: Layout, turns: str, budget: str = "6MiB") -> Plan:
    memory = Memory(budget=budget, disk=str(disk)) if turns else Memory()
    return Plan(layout=layout, tiles=Tiles(strict=True, turns=turns), memory=memory)


def trained(
    net: nn.Module, loss: nn.Module, scans: Any, *, lr: float = 0.1
) -> Callable[[Mesh], Any]:
    """Losses of two epochs, the parameters and buffers then, and outputs."""

    def check(mesh: Mesh) -> list[Tensor]:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=loss)
        optim = torch.optim.SGD(model.parameters(), lr=lr)
        found = list[Tensor]()
        loader = ff.loader(scans, mesh, batch_size=2, seed=7)
        for _ in range(2):
            for batch in loader:
                x, y = batch.values() if isinstance(batch, dict) else batch
                optim.zero_grad()
                found.append(model.step(x, y))
                optim.step()
        found += model.state_dict().values()
        return [*found, _evaluated(model, loader)]

    return check


def _evaluated(model: ParallelModel, loader: Any) -> Tensor:
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        x, _ = batch.values() if isinstance(batch, dict) else batch
        with torch.no_grad():
            total += model.whole(model(x)).square().sum()
    return total


LOSSES = {
    "mse": nn.MSELoss(),
    "weighted": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=-1),
}


@pytest.mark.filterwarnings("ignore:all .* replicas gave")
@pytest.mark.parametrize(
    ("layout", "turns"),
    [
        (Layout(), "height=4,width=2"),
        (Layout(), "auto"),
        (Layout(data=2), "height=4"),
        (Layout(height=2), "height=2,width=2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", LOSSES)
def test_exact_and_never_whole(kind: str, layout: Layout, turns: str, tmp_path: Path) -> None:
    net, loss = net_of(), LOSSES[kind]
    scans = Scans(classes=kind != "mse", named=kind == "mse")
    expected = run_ranks(layout, trained(net, loss, scans), plan=plan_of(tmp_path, layout, ""))[0]
    scans.read.clear()
    plan = plan_of(tmp_path, layout, turns, "1800KiB" if turns == "auto" else "6MiB")
    got = run_ranks(layout, trained(net, loss, scans), plan=plan)[0]
    torch.testing.assert_close(got[:-1], expected[:-1], rtol=1e-9, atol=1e-11)
    if layout.data == 1:
        torch.testing.assert_close(got[-1], expected[-1], rtol=1e-9, atol=1e-11)
    whole = SIZE[0] * SIZE[1]
    tile = whole // (layout.tiles * (2 if turns == "auto" else 4))
    assert max(scans.read) < 1.2 * (whole // layout.tiles if kind == "weighted" else tile)
    assert sum(scans.read) > 2 * 5 * whole // layout.size


def test_against_plain_torch(tmp_path: Path) -> None:
    net, scans = net_of()[:6], Scans(classes=False)
    net = nn.Sequential(*net, nn.Conv2d(8, 3, 1).double())
    plan = plan_of(tmp_path, Layout(), "height=3,width=2")
    got = run_ranks(1, trained(net, nn.MSELoss(), scans), plan=plan)[0]

    def samples(mesh: Mesh) -> list[Any]:
        loader = ff.loader(scans, mesh, batch_size=2, seed=7)
        return [batch for _ in range(2) for batch in loader]

    own, losses = copy.deepcopy(net), list[Tensor]()
    optim = torch.optim.SGD(own.parameters(), lr=0.1)
    for x, y in run_ranks(1, samples)[0]:
        optim.zero_grad()
        losses.append(nn.functional.mse_loss(own(x), y))
        losses[-1].backward()
        optim.step()
    torch.testing.assert_close(got[:6], [one.detach() for one in losses])
    torch.testing.assert_close(got[6:-1], [*own.state_dict().values()])


@pytest.mark.parametrize("kind", ["tiff", "zarr"])
def test_files(kind: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 96, 130, 3), dtype=np.uint8)
    scaled = on_windows(lambda image: image.double() / 255)
    scans: Any
    if kind == "tiff":
        tifffile = pytest.importorskip("tifffile")
        files = [tmp_path / f"{number}.tif" for number in range(2)]
        for file, image in zip(files, pixels, strict=True):
            tifffile.imwrite(file, image, photometric="rgb", tile=(32, 32))
        scans = TiffImages(files, files, transform=scaled, target_transform=scaled)
    else:
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(tmp_path / "scans.zarr", mode="w")
        array = pixels.transpose(0, 3, 1, 2)
        group.create_array("images", data=array, chunks=(1, 3, 32, 32))
        group.create_array("targets", data=array, chunks=(1, 3, 32, 32))
        scans = ZarrImages(
            tmp_path / "scans.zarr", "images", "targets", transform=scaled, target_transform=scaled
        )
    net = net_of()
    layout = Layout()
    check = trained(net, nn.L1Loss(), scans, lr=0.01)
    expected = run_ranks(1, check, plan=plan_of(tmp_path, layout, ""))[0]
    got = run_ranks(1, check, plan=plan_of(tmp_path, layout, "height=2,width=3"))[0]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


# ---- the tensors


def unread() -> tuple[Unread, Tensor, list[int]]:
    whole, read = torch.arange(2 * 3 * 7 * 9).view(2, 3, 7, 9), list[int]()

    def source(box: Any) -> Tensor:
        found = whole[tuple(slice(one.start, one.stop) for one in box)]
        read.append(found.numel())
        return found.clone()

    return Unread(source, [*map(range, whole.shape)], whole.dtype), whole, read


def test_cuts_read_nothing() -> None:
    image, whole, read = unread()
    cut = image[1:, :, 2:6][..., -4:].detach()
    assert isinstance(cut, Unread)
    assert cut.shape == (1, 3, 4, 4) and not read
    assert torch.equal(cut.fresh(), whole[1:, :, 2:6, -4:])
    assert read == [48]
    both = torch.stack([image, image])
    assert isinstance(both, Unread)
    part = both[1:, :1]
    assert isinstance(part, Unread)
    assert torch.equal(part.fresh(), whole[None, :1])
    assert read == [48, 63 * 3]
    assert "Unread(shape=(2, 3, 7, 9)" in repr(image)
    assert torch.equal(image.new_zeros(2), torch.zeros(2, dtype=whole.dtype))
    assert read == [48, 63 * 3]
    assert isinstance(image.to("cpu"), Unread) and isinstance(image.view_as(image), Unread)


USES: list[Callable[[Any], Any]] = [
    lambda t: t + 1, lambda t: t.sum(), lambda t: t[0], lambda t: t[:, ::2], lambda t: t.numpy(),
    np.asarray, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)),
    lambda t: t.tolist(), lambda t: t.view(6, 63), lambda t: t.float(), lambda t: torch.cat([t, t]),
    lambda t: torch.equal(t, t + 0), lambda t: t[t > 5], lambda t: t.permute(3, 0, 1, 2),
    lambda t: torch.stack([t, t], 1), lambda t: t.contiguous(), lambda t: t.clone(),
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_all_else_reads_once(use: Callable[[Tensor], Any]) -> None:
    image, whole, read = unread()
    want, got = use(whole), use(image)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    use(image)
    assert read == [whole.numel()]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),  # pyright: ignore[reportUnknownLambdaType]
        lambda t: t[:1].zero_(),  # pyright: ignore[reportUnknownLambdaType]
        lambda t: t.__setitem__((slice(None), slice(0, 1)), 3),  # pyright: ignore[reportUnknownLambdaType]
        lambda t: torch.add(t, 1, out=t),  # pyright: ignore[reportUnknownLambdaType]
    ],
)
def test_changes_in_place_are_refused(change: Callable[[Tensor], Any]) -> None:
    image, whole, _ = unread()
    with pytest.raises(UsageError, match="cannot be changed in place"):
        change(image)
    assert torch.equal(torch.zeros_like(whole).copy_(image), whole), "what is only read may be"
    assert [len(one) for one in pieces(image)] == [2]


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.mesh.unread._PIECE", 2 * 3 * 9 * 2)
    image, whole, read = unread()
    assert torch.equal(torch.cat([*pieces(image)], 2), whole)
    assert max(read) == 2 * 3 * 9 * 2 and image.kept is None


def test_workers_are_told_that_they_are_not_used(tmp_path: Path) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.warns(DataWarning, match="workers=2 is not used"):
            ff.loader(Scans(classes=False), mesh, batch_size=2, workers=2)

    run_ranks(1, check, plan=plan_of(tmp_path, Layout(), "height=2"))
