"""U-Net: Ronneberger et al. 2015, "U-Net: convolutional networks for biomedical image segmentation".

The network of figure 1 as it is used today: convolutions keep the size (the paper's lose two pixels
each), and a batch norm follows each.

    x ─ 64 ─────────────────────────────────── + ─ 64 ─ classes      ─  two 3x3 convolutions
        └ 128 ──────────────────────── + ─ 128 ┘                     └  max-pool: half the size
          └ 256 ─────────────── + ─ 256 ┘                            ┘  up: twice the size, half the channels
            └ 512 ────── + ─ 512 ┘                                   +  concatenation
              └─ 1024 ───┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["UNet", "unet", "unet_bilinear"]


class _TransposedUp(nn.Module):
    """A transposed 2x2 convolution, as in the paper; zeros fill what an odd skip has more."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.conv(x)
        rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


class _BilinearUp(nn.Module):
    """Bilinear interpolation to the skip's size, odd or even.

    The 1x1 convolution that halves the channels comes first: the two commute, and it is cheaper here.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, inputs // 2, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), skip.shape[2:], mode="bilinear", align_corners=False)


class UNet(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes, H, W]` logits; H and W from 2**depth up, in any mix."""

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        width: int = 64,
        depth: int = 4,
        bilinear: bool = False,
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        up = _BilinearUp if bilinear else _TransposedUp
        self.inputs = _double(channels, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(_double(w, 2 * w) for w in widths[:-1])
        self.up = nn.ModuleList(up(w) for w in reversed(widths[1:]))
        self.merge = nn.ModuleList(_double(w, w // 2) for w in reversed(widths[1:]))
        self.outputs = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel."""
        x = self.inputs(x)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = merge(torch.cat((skip, up(x, skip)), dim=1))
        return self.outputs(x)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*_conv(inputs, outputs), *_conv(outputs, outputs))


def _conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")  # section 3 of the paper
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def unet(classes: int = 10, channels: int = 3, *, width: int = 64, depth: int = 4) -> UNet:
    """U-Net with transposed convolutions: 31.04 million parameters."""
    return UNet(classes, channels, width=width, depth=depth)


def unet_bilinear(classes: int = 10, channels: int = 3, *, width: int = 64, depth: int = 4) -> UNet:
    """U-Net with bilinear up-sampling: 28.95 million parameters."""
    return UNet(classes, channels, width=width, depth=depth, bilinear=True)
