"""DenseNet-121: Huang et al. 2017, "Densely connected convolutional networks", table 1.

DenseNet-BC: every layer sees the concatenation of all before it in its block, through a 1x1 bottleneck;
transitions halve channels and size. State_dict keys are those of torchvision, so its weights load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["DenseNet", "densenet121"]


class _Layer(nn.Module):
    """Batch norm, ReLU, 1x1 to four times the growth; batch norm, ReLU, 3x3 to the growth."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(x)))
        return self.conv2(self.relu2(self.norm2(x)))


class _Block(nn.Module):
    """Layers, each of which sees the block's input and what all layers before it made."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", _Layer(inputs + i * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.children():
            made.append(layer(torch.cat(made, dim=1)))
        return torch.cat(made, dim=1)


class DenseNet(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224.

    Works from 32x32; each block less than the usual four halves that.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        growth: int = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
    ) -> None:
        super().__init__()
        width = 2 * growth
        self.features = _stem(channels, width)
        for number, layers in enumerate(blocks, start=1):
            self.features.add_module(f"denseblock{number}", _Block(layers, width, growth))
            width += layers * growth
            if number < len(blocks):
                self.features.add_module(f"transition{number}", _transition(width))
                width //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        return self.classifier(self.avgpool(self.relu(self.features(x))).flatten(1))


def _stem(channels: int, width: int) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "conv0": nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
        "norm0": nn.BatchNorm2d(width),
        "relu0": nn.ReLU(inplace=True),
        "pool0": nn.MaxPool2d(3, stride=2, padding=1),
    }
    return nn.Sequential(OrderedDict(layers))


def _transition(width: int) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "norm": nn.BatchNorm2d(width),
        "relu": nn.ReLU(inplace=True),
        "conv": nn.Conv2d(width, width // 2, 1, bias=False),
        "pool": nn.AvgPool2d(2),
    }
    return nn.Sequential(OrderedDict(layers))


def densenet121(
    classes: int = 10,
    channels: int = 3,
    *,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
) -> DenseNet:
    """DenseNet-121: 7.98 million parameters at 1000 classes."""
    return DenseNet(classes, channels, growth=growth, blocks=blocks)
