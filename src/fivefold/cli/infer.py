"""`fivefold infer`: what a model returns for an image of any size, window by window."""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from fivefold.cli import model as models
from fivefold.cli import parse_options
from fivefold.cli.nodes import IN_LINE, NodeOptions
from fivefold.errors import UsageError
from fivefold.launch.environment import launched, locate
from fivefold.plan import Layout, Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Infer"]


def _option(metavar: str, *aliases: str) -> object:
    return tyro.conf.arg(metavar=metavar, aliases=aliases)


@dataclass(frozen=True)
class Infer:
    """Write what a model returns for an image that need not fit in memory, window by window.

    The output is that of the whole image. Nets that take statistics or attention over whole images are
    refused. Started again after it was killed, it goes on where it was.

    Example: fivefold infer edsr_small --weights best.pt --input slide.tif --output large.zarr
    """

    model: Annotated[str, tyro.conf.Positional, _option("MODEL")]
    """edsr_small and the like, package.module:callable, or torchvision:NAME"""
    weights: Annotated[Path, _option("FILE")]
    """the model's state_dict, as torch.save writes it"""
    input: Annotated[Path, _option("PATH")]
    """a TIFF file, or an array N x C x H x W of a zarr store, such as scans.zarr/images"""
    output: Annotated[Path, _option("PATH")]
    """the TIFF file to write, such as large.tif, or a zarr group: an array for each image, "0", "1" ..."""
    tile: Annotated[int, _option("N")] = 1024
    """pixels of an edge of a window"""
    argmax: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """write the number of the largest channel, a class, instead of channels"""
    scale: Annotated[float | None, _option("X")] = None
    """what pixels are multiplied by; default: 1/255 for bytes, 1 for others"""
    classes: Annotated[int, _option("N")] = 10
    """how many classes a model of Fivefold's own tells apart"""
    channels: Annotated[int, _option("N")] = 3
    """how many channels images have, for a model of Fivefold's own"""
    processes: Annotated[int, _option("N", "-n", "-np")] = 1
    """number of processes, which take windows in turn"""
    nodes: Annotated[NodeOptions, IN_LINE] = field(default_factory=NodeOptions)
    words: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Infer:
        """Read the options, and keep them as they are for the ranks."""
        return replace(cast(Infer, parse_options(cls, words, "infer")), words=tuple(words))

    def run(self) -> int:
        """Start the ranks, or be one."""
        self._check()
        if launched():
            self.nodes.refuse_when_launched()
            return self._infer(locate().world_size)
        hosts = self.nodes.hosts_told()
        if self.processes == 1 and not hosts.trainers:
            return self._infer(1)
        logs = Path(tempfile.mkdtemp(prefix="fivefold-infer-"))
        command = [sys.executable, "-m", "fivefold", "infer", *self.words]
        job, engine = self.nodes.job(hosts, command, self.processes, logs, {})
        engine.run(job)  # what it raises names the logs
        shutil.rmtree(logs, ignore_errors=True)
        return 0

    def _check(self) -> None:
        models.check(self.model)
        for name, path in {"weights": self.weights, "input": self.input}.items():
            if not path.exists():
                raise UsageError(f"--{name} {path}: there is no such file or folder")
        parent = self.output.resolve().parent
        if not parent.is_dir():
            raise UsageError(f"--output {self.output}: there is no folder {parent}")
        for name in ("tile", "classes", "channels", "processes"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"--{name} {value}: at least 1 is needed")

    def _infer(self, processes: int) -> int:
        from fivefold import infer, parallelize, start

        net = models.load(self.model, self.classes, self.channels)
        _load(net, self.weights)
        images = self._images()
        with start(Plan(layout=Layout(data=processes))) as mesh:
            model = parallelize(net, mesh)
            then = _classes if self.argmax else None
            infer(model, images, self.output, tile=self.tile, then=then)
        return 0

    def _images(self) -> Any:
        import torch

        from fivefold.data.tiff import TiffImages
        from fivefold.data.windows import on_windows
        from fivefold.data.zarr import ZarrImages

        def prepared(image: Tensor) -> Tensor:
            bytes_too = 1 / 255 if image.dtype == torch.uint8 else 1.0
            return image.float() * (bytes_too if self.scale is None else self.scale)

        transform = on_windows(prepared)
        if self.input.is_dir():
            return ZarrImages(self.input.parent, self.input.name, transform=transform)
        return TiffImages([self.input], transform=transform)


def _classes(outputs: Tensor) -> Tensor:
    return outputs.argmax(1).byte() if outputs.shape[1] <= 256 else outputs.argmax(1)


def _load(net: nn.Module, path: Path) -> None:
    import torch

    try:
        told = torch.load(path, map_location="cpu", weights_only=True)
        net.load_state_dict(told)
    except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as problem:
        said = " ".join(str(problem).split())
        raise UsageError(
            f"--weights {path} is no state_dict of this model, as torch.save(net.state_dict(), path) "
            f"writes it: {said[:300]}"
        ) from None
