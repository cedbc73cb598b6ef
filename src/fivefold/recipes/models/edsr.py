"""EDSR: Lim et al. 2017, "Enhanced deep residual networks for single image super-resolution", figure 3.

Twice the size in each direction. Residual blocks without batch norm; their last convolution is scaled
(section 3.3), which keeps wide networks stable. Images are to be centred on zero by who feeds them.

The paper does not tell how weights begin. Here convolutions keep the variance, and blocks add little to
it (Wang et al. 2018, "ESRGAN", section 3.1): that halves the steps to the quality of an interpolation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Edsr", "edsr", "edsr_small"]


class _Block(nn.Module):
    """Figure 2 (c): two 3x3 convolutions, scaled, around an identity shortcut."""

    def __init__(self, features: int, scaling: float) -> None:
        super().__init__()
        self.conv1 = _conv(features, features)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(features, features)
        with torch.no_grad():
            self.conv2.weight *= 0.1  # blocks begin close to the identity
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scaling * self.conv2(self.relu(self.conv1(x)))


class Edsr(nn.Module):
    """`[N, channels, H, W]` images to `[N, channels, 2H, 2W]`; H and W in any mix."""

    def __init__(
        self, channels: int = 3, *, blocks: int = 16, features: int = 64, scaling: float = 1.0
    ) -> None:
        super().__init__()
        self.head = _conv(channels, features)
        self.body = nn.Sequential(
            *(_Block(features, scaling) for _ in range(blocks)), _conv(features, features)
        )
        self.up = nn.Sequential(_conv(features, 4 * features), nn.PixelShuffle(2))
        self.tail = _conv(features, channels)

    def forward(self, x: Tensor) -> Tensor:
        """The images, enlarged."""
        x = self.head(x)
        return self.tail(self.up(x + self.body(x)))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


def edsr(
    classes: int = 10,
    channels: int = 3,
    *,
    blocks: int = 16,
    features: int = 64,
    scaling: float = 1.0,
) -> Edsr:
    """The baseline of table 1, times two: 1.37 million parameters. `classes` has no meaning here.

    The paper's largest has 32 blocks, 256 features and a scaling of 0.1.
    """
    del classes
    return Edsr(channels, blocks=blocks, features=features, scaling=scaling)


def edsr_small(
    classes: int = 10, channels: int = 3, *, blocks: int = 4, features: int = 32
) -> Edsr:
    """Four blocks of 32 features: 0.12 million parameters, for processors without an accelerator."""
    return edsr(classes, channels, blocks=blocks, features=features)
