"""Residual networks for small images: He et al. 2015, "Deep residual learning", section 4.2.

Three stages of n blocks on 16, 32 and 64 channels, depth 6n + 2. Shortcuts are the paper's option
A: where the shape changes, the identity is subsampled and padded with zero channels, so a residual
network has exactly the parameters of the plain one. Works from 8x8 pixels up.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CifarResNet", "resnet20", "resnet56"]


class _Block(nn.Module):
    """Two 3x3 convolutions around an identity shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, kernel_size=1, stride=self.stride)  # every second row and column
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return x


class CifarResNet(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; H and W of at least 8, in any mix."""

    def __init__(self, blocks_per_stage: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.stage1 = _stage(blocks_per_stage, 16, 16, stride=1)
        self.stage2 = _stage(blocks_per_stage, 16, 32, stride=2)
        self.stage3 = _stage(blocks_per_stage, 32, 64, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(self.pool(x).flatten(1))


def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    first = _Block(inputs, outputs, stride)
    return nn.Sequential(first, *(_Block(outputs, outputs, 1) for _ in range(blocks - 1)))


def resnet20(classes: int = 10, channels: int = 3) -> CifarResNet:
    """ResNet-20: 0.27 million parameters."""
    return CifarResNet(3, classes, channels)


def resnet56(classes: int = 10, channels: int = 3) -> CifarResNet:
    """ResNet-56: 0.85 million parameters."""
    return CifarResNet(9, classes, channels)
