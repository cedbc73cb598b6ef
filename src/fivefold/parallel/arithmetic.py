"""Precision and memory format, applied to a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.mesh import attach, part_of
from fivefold.parallel.trees import map_tensors
from fivefold.plan import Numerics

__all__ = ["Arithmetic"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Arithmetic:
    """The precision and memory format of a loop: `net` and `images` lay out, `autocast` surrounds."""

    def __init__(self, numerics: Numerics, device: torch.device) -> None:
        self.numerics = numerics
        self._device = device
        self._bfloat16 = numerics.precision == "bfloat16"
        self._channels_last = numerics.memory_format == "channels_last"

    def autocast(self) -> torch.autocast:
        """A context for one step. Not for several: it caches what weights were when first cast."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16)

    def net(self, net: nn.Module) -> nn.Module:
        """The net with its weights laid out, which convolutions then keep to; before `parallelize`."""
        if self._channels_last:
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return net

    def inputs(self, inputs: Any) -> Any:
        """A tree of inputs with its images laid out."""
        return map_tensors(self.images, inputs) if self._channels_last else inputs

    def images(self, images: Tensor) -> Tensor:
        """The images laid out, still knowing which part of the global batch they are."""
        layout = _CHANNELS_LAST.get(images.dim()) if self._channels_last else None
        if layout is None:
            return images
        part, laid_out = part_of(images), images.contiguous(memory_format=layout)
        return laid_out if part is None else attach(laid_out, part)
