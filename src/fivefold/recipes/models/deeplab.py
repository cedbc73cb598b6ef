"""DeepLabV3 on ResNet-50: Chen et al. 2017, "Rethinking atrous convolution for image segmentation".

    x ─ ResNet-50, last two layers dilated: an eighth of the size
        ├ 1x1 ───────────────────────────┐
        ├ 3x3, dilated by 12 ────────────┤
        ├ 3x3, dilated by 24 ────────────┼ concatenation ─ 1x1 ─ 3x3 ─ 1x1 ─ bilinear to the size of x
        ├ 3x3, dilated by 36 ────────────┤
        └ mean of the image ─ bilinear ──┘

State_dict keys as torchvision has them, without the auxiliary classifier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.recipes.models.resnet import bottleneck_trunk, initialise

__all__ = ["DeepLabV3", "deeplabv3"]


class _ImagePool(nn.Sequential):
    """The mean of the image through a 1x1 convolution, at every pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), *_conv(inputs, outputs, 1))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        size = input.shape[2:]
        return F.interpolate(super().forward(input), size, mode="bilinear", align_corners=False)


class _Aspp(nn.Module):
    """Atrous spatial pyramid pooling: section 3.3."""

    def __init__(self, inputs: int, outputs: int, rates: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            (
                nn.Sequential(*_conv(inputs, outputs, 1)),
                *(nn.Sequential(*_conv(inputs, outputs, 3, rate)) for rate in rates),
                _ImagePool(inputs, outputs),
            )
        )
        self.project = nn.Sequential(
            *_conv((len(rates) + 2) * outputs, outputs, 1), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class DeepLabV3(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes, H, W]` logits; H and W from 8, in any mix.

    The batch norm behind the image's mean sees one value per image: to train takes two images or more.

    Args:
        classes: how many logits for each pixel.
        channels: of the images.
        blocks: of each layer of the ResNet.
        width: of the ResNet's first layer.
        features: channels of the pyramid.
        rates: dilations of the pyramid, in pixels of an eighth of the size.
        dropout: share of the pyramid's outputs.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        features: int = 256,
        rates: Sequence[int] = (12, 24, 36),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.backbone = bottleneck_trunk(blocks, channels, width=width, dilated=2)
        self.classifier = nn.Sequential(
            _Aspp(self.backbone.features, features, rates, dropout),
            *_conv(features, features, 3),
            nn.Conv2d(features, classes, 1),
        )
        initialise(self.backbone)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel."""
        logits = self.classifier(self.backbone(x))
        return F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)


def _conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(
        inputs, outputs, kernel, padding=dilation * (kernel // 2), dilation=dilation, bias=False
    )
    return conv, nn.BatchNorm2d(outputs), nn.ReLU()


def deeplabv3(
    classes: int = 10,
    channels: int = 3,
    *,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    features: int = 256,
    rates: Sequence[int] = (12, 24, 36),
    dropout: float = 0.5,
) -> DeepLabV3:
    """DeepLabV3 on ResNet-50: 39.64 million parameters at 21 classes."""
    return DeepLabV3(
        classes, channels, blocks=blocks, width=width, features=features, rates=rates, dropout=dropout
    )  # fmt: skip
