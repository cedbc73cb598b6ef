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
    refused. Started again after it was killed, it goes on where it was. With --target it is compared, too.

    Example: fivefold infer edsr_small --weights best.pt --input slide.tif --output large.zarr
    """

    model: Annotated[str, tyro.conf.Positional, _option("MODEL")]
    """edsr_small and the like, package.module:callable, or torchvision:NAME"""
    weights: Annotated[Path, _option("FILE")]
    """the model's state_dict, as torch.save writes it"""
    input: Annotated[Path, _option("PATH")]
    """a TIFF file, or an array N x C x H x W of a zarr store, such as scans.zarr/images"""
    output: Annotated[Path | None, _option("PATH")] = None
    """the TIFF file to write, such as large.tif, or a zarr group: an array for each image, "0", "1" ..."""
    target: Annotated[Path | None, _option("PATH")] = None
    """what should come out: prints accuracy (of a map of classes) or PSNR; --output may be left out"""
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
        read = {"weights": self.weights, "input": self.input, "target": self.target}
        for name, path in read.items():
            if path is not None and not path.exists():
                raise UsageError(f"--{name} {path}: there is no such file or folder")
        if self.output is None:
            if self.target is None or self.argmax:
                raise UsageError(
                    "without --output nothing is written: give --target, and no --argmax"
                )
        elif not (parent := self.output.resolve().parent).is_dir():
            raise UsageError(f"--output {self.output}: there is no folder {parent}")
        if self.target is not None and self.target.is_dir() != self.input.is_dir():
            raise UsageError(
                f"--target {self.target}: it and --input are both TIFF files, or both arrays of zarr stores"
            )
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
            score = None if self.target is None else _sums
            sums = infer(model, images, self.output, tile=self.tile, then=then, score=score)
            if score is not None and not mesh.rank:
                print(_in_words(sums.tolist()))
        return 0

    def _images(self) -> Any:
        import torch

        from fivefold.data.tiff import TiffImages
        from fivefold.data.windows import on_windows
        from fivefold.data.zarr import ZarrImages

        def prepared(image: Tensor) -> Tensor:
            bytes_too = 1 / 255 if image.dtype == torch.uint8 else 1.0
            return image.float() * (bytes_too if self.scale is None else self.scale)

        def wanted(target: Tensor) -> Tensor:
            return target if _is_map(target, 1 + len(data.images[0].size)) else prepared(target)

        transforms: dict[str, Any] = {
            "transform": on_windows(prepared),
            "target_transform": on_windows(wanted),
        }
        data: TiffImages | ZarrImages
        if self.input.is_dir():
            targets = None if self.target is None else str(self.target.resolve())  # of any group
            data = ZarrImages(self.input.parent, self.input.name, targets, **transforms)
        else:
            data = TiffImages([self.input], self.target and [self.target], **transforms)
        return data


def _is_map(target: Tensor, image_dims: int) -> bool:
    """Whether it is of classes: whole numbers without channels."""
    return target.dim() < image_dims and not target.is_floating_point()


def _sums(outputs: Tensor, target: Tensor) -> Tensor:
    """Those of a task, and how many pixels were compared with classes."""
    import torch

    from fivefold.train.task import CLASSES, PICTURES

    classes, channels = _is_map(target, outputs.dim()), outputs.shape[1]
    if classes and (target.min() < 0 or target.max() >= channels):
        raise UsageError(
            f"--target has classes {target.min()} to {target.max()}, and the model tells {channels} apart, "
            "from 0 on; a picture needs channels, or numbers with a point"
        )
    if target.dim() < outputs.dim() and not classes:
        target = target[:, None]
    if not classes and target.shape != outputs.shape:
        raise UsageError(
            f"--target has {target.shape[1]} channels, and the model returns {channels}"
        )
    sums = (CLASSES if classes else PICTURES).sums(outputs, target)
    return torch.cat([sums, sums.new_tensor([classes * target.numel()])])


def _in_words(sums: list[float]) -> str:
    from fivefold.train.task import CLASSES, PICTURES

    *told, classes = sums
    if classes:
        found = CLASSES.figures(told)
        return f"accuracy {found['accuracy']:.4f}, cross-entropy {found['test_loss']:.4f}"
    found = PICTURES.figures(told)
    return f"PSNR {found['psnr_db']:.2f} dB, mean absolute error {found['test_loss']:.3g}"


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
