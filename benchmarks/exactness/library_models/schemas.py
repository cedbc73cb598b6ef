"""What torchvision's wheel on PyPI needs beside a CPU build of torch.

It is built for CUDA, so its compiled operators do not load there, and the import fails on the first
that it registers a fake for. Declaring two is enough for models. Beside the build that PyPI has they do load,
and declaring one twice ends the process.
"""

from __future__ import annotations

import torch

__all__ = ["declare"]

_kept: list[torch.library.Library] = []  # a schema disappears with its Library


def declare() -> None:
    """Make `import torchvision`, and that of libraries that are built on it, succeed."""
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
