"""ShuffleNetV2: Ma et al. 2018, "Practical guidelines for efficient CNN architecture design".

The network of table 5, made of the units of figure 3. State_dict keys are those of torchvision, so
its weights load.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ShuffleNetV2", "shufflenet_v2_x1_0"]


class _Unit(nn.Module):
    """Figure 3 (c) and (d): one half of the channels passes, the other is convolved; then both mix.

    A unit that strides convolves both branches, so each sees all input channels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(
                *_depthwise(inputs, stride), *_pointwise(inputs, half), nn.ReLU(inplace=True)
            )
        self.branch2 = nn.Sequential(
            *_pointwise(inputs if stride > 1 else half, half),
            nn.ReLU(inplace=True),
            *_depthwise(half, stride),
            *_pointwise(half, half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            left, right = self.branch1(x), self.branch2(x)
        else:
            kept, convolved = x.chunk(2, dim=1)
            left, right = kept, self.branch2(convolved)
        return _shuffle(torch.cat((left, right), dim=1))


class ShuffleNetV2(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32."""

    def __init__(self, widths: tuple[int, ...], classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        stem, second, third, fourth, last = widths
        self.conv1 = nn.Sequential(
            nn.Conv2d(channels, stem, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(inplace=True),
        )
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stage2 = _stage(4, stem, second)
        self.stage3 = _stage(8, second, third)
        self.stage4 = _stage(4, third, fourth)
        self.conv5 = nn.Sequential(*_pointwise(fourth, last), nn.ReLU(inplace=True))
        self.fc = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        x = self.maxpool(self.conv1(x))
        x = self.conv5(self.stage4(self.stage3(self.stage2(x))))
        return self.fc(x.mean((2, 3)))


def _stage(units: int, inputs: int, outputs: int) -> nn.Sequential:
    first = _Unit(inputs, outputs, stride=2)
    return nn.Sequential(first, *(_Unit(outputs, outputs, stride=1) for _ in range(units - 1)))


def _depthwise(channels: int, stride: int) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
    return conv, nn.BatchNorm2d(channels)


def _pointwise(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)


def _shuffle(x: Tensor) -> Tensor:
    """Interleave the two halves of the channels: a b c | d e f -> a d b e c f."""
    n, channels, height, width = x.shape
    halves = x.view(n, 2, channels // 2, height, width)
    return halves.transpose(1, 2).reshape(n, channels, height, width)


def shufflenet_v2_x1_0(classes: int = 10, channels: int = 3) -> ShuffleNetV2:
    """ShuffleNetV2 1x: 2.28 million parameters at 1000 classes."""
    return ShuffleNetV2((24, 116, 232, 464, 1024), classes, channels)
