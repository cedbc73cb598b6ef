"""Models that recipes start by name. They are ordinary modules: nothing here knows of processes.

`resnet20` and `resnet56` are made for small images; the others load torchvision's weights.
Initialisation draws from torch's generator alone, so `torch.manual_seed` decides every weight. Names are
checked without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fivefold.errors import UsageError, suggest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "check", "names"]

_HOME = {
    "resnet20": "cifar_resnet",
    "resnet56": "cifar_resnet",
    "resnet18": "resnet",
    "resnet50": "resnet",
    "shufflenet_v2_x1_0": "shufflenet",
    "mobilenet_v2": "mobilenet",
}


def names() -> tuple[str, ...]:
    """The models that `build` knows, those for the smallest images first."""
    return tuple(_HOME)


def check(name: str) -> None:
    """Raise `UsageError` unless `build` knows this model."""
    if name not in _HOME:
        raise UsageError(f"unknown model {name!r}{suggest(name, _HOME)}")


def build(name: str, classes: int = 10, channels: int = 3) -> nn.Module:
    """A freshly initialised model: `[N, channels, H, W]` float images to `[N, classes]` logits.

    Raises `UsageError` for an unknown name.
    """
    check(name)
    module = import_module(f"fivefold.recipes.models.{_HOME[name]}")
    return getattr(module, name)(classes, channels)
