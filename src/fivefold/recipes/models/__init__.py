"""Models that recipes start by name. They are ordinary modules: nothing here knows of processes.

`resnet20` and `resnet56` are made for small images; the others load torchvision's weights.
Initialisation draws from torch's generator alone, so `torch.manual_seed` decides every weight.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fivefold.errors import UsageError, suggest
from fivefold.recipes.models.cifar_resnet import resnet20, resnet56
from fivefold.recipes.models.mobilenet import mobilenet_v2
from fivefold.recipes.models.resnet import resnet18, resnet50
from fivefold.recipes.models.shufflenet import shufflenet_v2_x1_0

__all__ = ["build", "names"]

_MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "shufflenet_v2_x1_0": shufflenet_v2_x1_0,
    "mobilenet_v2": mobilenet_v2,
}


def names() -> tuple[str, ...]:
    """The models that `build` knows, smallest images first."""
    return tuple(_MODELS)


def build(name: str, classes: int = 10, channels: int = 3) -> nn.Module:
    """A freshly initialised model: `[N, channels, H, W]` float images to `[N, classes]` logits.

    Raises `UsageError` for an unknown name.
    """
    if name not in _MODELS:
        raise UsageError(f"unknown model {name!r}{suggest(name, _MODELS)}")
    return _MODELS[name](classes, channels)
