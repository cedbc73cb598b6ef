"""Images, nets and ranks of the tests of inference."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.data.windows import Box
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.parallel.program.alone import AloneWindow
from fivefold.plan import Layout, Plan
from fivefold.recipes import models
from fivefold.train import infer_store
from ranks import run_ranks


class Images:
    """In memory; it notes how much is read at once."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        torch.manual_seed(4)
        self.images = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        self.most = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("whole images are not read")

    def sizes(self, index: int) -> tuple[int, ...]:
        return tuple(self.images[index].shape[1:])

    def window(self, index: int, box: Box) -> Tensor:
        found = self.images[index][box.slices]
        self.most = max(self.most, found[0].numel())
        return found


class Two(nn.Module):
    """Several outputs of other sizes than the image; max-pools, strides, norms, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(7, 2, 5, padding=2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.down(torch.relu(self.first(x))))
        up = nn.functional.interpolate(self.up(h), size=x.shape[-2:], mode="bilinear")
        whole = self.last(torch.cat([up, x], 1))
        return {"whole": whole, "half": nn.functional.max_pool2d(h, 3, 1, 1)}


def made(name: str) -> nn.Module:
    torch.manual_seed(2)
    net = Two() if name == "two" else models.build(name, 10)
    net = net.double()
    for norm in net.modules():  # running statistics that do something
        if isinstance(norm, (nn.BatchNorm2d, nn.BatchNorm3d)):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return net


def infer(net: nn.Module, images: Any, to: Path, ranks: int = 1, **more: Any) -> None:
    def check(mesh: Mesh) -> None:
        ff.infer(parallelize(copy.deepcopy(net), mesh), images, to, **more)

    run_ranks(Layout(data=ranks), check, plan=Plan(layout=Layout(data=ranks)))


@contextmanager
def full_after(windows: int) -> Generator[None]:
    """Within the block the disk is full when so many windows are written, which ends with an error."""
    write, written = infer_store.OutputStore.write, 0

    def ends(self: Any, *arguments: Any) -> None:
        nonlocal written
        if written == windows:
            raise OSError("no space left on device")
        written += 1
        write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_store.OutputStore, "write", ends)
        with pytest.raises(OSError, match="no space"):
            yield


def computed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The windows that are computed from now on."""
    compute, found = AloneWindow.compute, list[Tensor]()

    def noted(self: AloneWindow, image: Tensor) -> Any:
        found.append(image)
        return compute(self, image)

    monkeypatch.setattr(AloneWindow, "compute", noted)
    return found
