"""Models that recipes start by name. They are ordinary modules: nothing here knows of processes.

`resnet20` and `resnet56` are made for small images; `resnet18` to `mobilenet_v2`, `vgg16_bn` and
`densenet121` load torchvision's weights. Initialisation draws from torch's generator alone, so
`torch.manual_seed` decides every weight. Names are checked without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple

from fivefold.errors import UsageError, suggest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Returns", "build", "check", "dims", "names", "returns"]

Returns = Literal["classes", "class map", "picture"]
"""What a model makes of a batch: logits `[N, classes]`, logits of every pixel `[N, classes, H, W]`, or
pictures `[N, channels, 2H, 2W]`.
"""


class _Model(NamedTuple):
    module: str
    returns: Returns = "classes"
    dims: int = 2
    """of an image: height and width, or with depth before them"""


_HOME = {
    "resnet20": _Model("cifar_resnet"),
    "resnet56": _Model("cifar_resnet"),
    "resnet18": _Model("resnet"),
    "resnet34": _Model("resnet"),
    "resnet50": _Model("resnet"),
    "shufflenet_v2_x1_0": _Model("shufflenet"),
    "mobilenet_v2": _Model("mobilenet"),
    "vgg16_bn": _Model("vgg"),
    "densenet121": _Model("densenet"),
    "amoebanet_d": _Model("amoebanet"),
    "unet": _Model("unet", "class map"),
    "unet_bilinear": _Model("unet", "class map"),
    "unet3d": _Model("unet3d", "class map", dims=3),
    "deeplabv3": _Model("deeplab", "class map"),
    "edsr": _Model("edsr", "picture"),
    "edsr_small": _Model("edsr", "picture"),
}


def names(returning: Returns | None = None) -> tuple[str, ...]:
    """The models that `build` knows, or those of them that return such a thing."""
    return tuple(n for n, entry in _HOME.items() if returning in (None, entry.returns))


def check(name: str) -> None:
    """Raise `UsageError` unless `build` knows this model."""
    if name not in _HOME:
        raise UsageError(f"unknown model {name!r}{suggest(name, _HOME)}")


def returns(name: str) -> Returns:
    """What the model makes of a batch. Raises `UsageError` for an unknown name."""
    check(name)
    return _HOME[name].returns


def dims(name: str) -> int:
    """2 for images, 3 for volumes. Raises `UsageError` for an unknown name."""
    check(name)
    return _HOME[name].dims


def build(name: str, classes: int = 10, channels: int = 3, **options: object) -> nn.Module:
    """A freshly initialised model of `[N, channels, H, W]` float images; `returns` tells what comes of them.

    `options` are those of the function of that name, such as `width=8` for `unet`. Raises `UsageError`
    for an unknown name.
    """
    check(name)
    module = import_module(f"fivefold.recipes.models.{_HOME[name].module}")
    return getattr(module, name)(classes, channels, **options)
