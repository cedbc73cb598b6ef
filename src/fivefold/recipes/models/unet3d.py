"""3-D U-Net: Çiçek et al. 2016, "3D U-Net: learning dense volumetric segmentation", figure 2.

As the U-Net, but channels double before each max-pool, and a transposed convolution keeps them. As is
usual today, convolutions keep the size; the paper's lose two voxels each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["UNet3d", "unet3d"]


class UNet3d(nn.Module):
    """`[N, channels, D, H, W]` volumes to `[N, classes, D, H, W]` logits.

    D, H and W of at least 2**depth, in any mix.
    """

    def __init__(
        self, classes: int = 10, channels: int = 3, *, width: int = 32, depth: int = 3
    ) -> None:
        super().__init__()
        widths = [2 * width * 2**level for level in range(depth + 1)]  # what each level ends with
        self.inputs = _double(channels, width, widths[0])
        self.pool = nn.MaxPool3d(2)
        self.down = nn.ModuleList(_double(w, w, 2 * w) for w in widths[:-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(w, w, 2, stride=2, bias=False) for w in reversed(widths[1:])
        )
        self.merge = nn.ModuleList(
            _double(w + w // 2, w // 2, w // 2) for w in reversed(widths[1:])
        )
        self.outputs = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every voxel."""
        x = self.inputs(x)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = merge(torch.cat((skip, _fit(up(x), skip)), dim=1))
        return self.outputs(x)


def _fit(x: Tensor, skip: Tensor) -> Tensor:
    """`x` with zeros behind its last voxels where the skip's size is odd."""
    planes, rows, columns = (skip.shape[dim] - x.shape[dim] for dim in (2, 3, 4))
    return F.pad(x, (0, columns, 0, rows, 0, planes)) if planes or rows or columns else x


def _double(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*_conv(inputs, middle), *_conv(middle, outputs))


def _conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv3d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)


def unet3d(classes: int = 10, channels: int = 3, *, width: int = 32, depth: int = 3) -> UNet3d:
    """3-D U-Net: the 19,069,955 parameters of the paper, and 4,672 of batch norm, at 3 classes."""
    return UNet3d(classes, channels, width=width, depth=depth)
