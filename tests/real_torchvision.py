"""The real torchvision, where it can be had, to compare our models with.

Its wheel on PyPI is built for CUDA: beside a CPU build of torch its compiled operators do not load,
and the import fails on the first that it registers a fake for. Declaring two is enough for models. Beside the
build that PyPI has they do load, and declaring one twice ends the process.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

__all__ = ["declare_missing", "torchvision_models"]

_kept: list[torch.library.Library] = []  # a schema disappears with its Library


def declare_missing() -> None:
    """Let torchvision be imported beside a build of torch for which its operators do not load."""
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)


def torchvision_models() -> ModuleType:
    """`torchvision.models`; skips the calling test, with the reason, when it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip(
            "torchvision is not installed; pip install --no-deps -c constraints.txt torchvision"
        )
    declare_missing()
    from torchvision import models

    return models
