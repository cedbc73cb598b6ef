"""ResNet-18 and ResNet-50: He et al. 2015, "Deep residual learning", table 1.

As torchvision has them, with equal state_dict keys, so its weights load: the bottleneck strides in
its 3x3 convolution ("v1.5"), and changes of shape are projected by a 1x1 convolution (option B).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["ResNet", "resnet18", "resnet50"]


class _Basic(nn.Module):
    """3x3, 3x3, and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32."""

    def __init__(
        self,
        block: type[_Basic | _Bottleneck],
        blocks: Sequence[int],
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        wide = block.expansion
        self.layer1 = _layer(block, blocks[0], 64, 64, stride=1)
        self.layer2 = _layer(block, blocks[1], 64 * wide, 128, stride=2)
        self.layer3 = _layer(block, blocks[2], 128 * wide, 256, stride=2)
        self.layer4 = _layer(block, blocks[3], 256 * wide, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _layer(
    block: type[_Basic | _Bottleneck], blocks: int, inputs: int, width: int, stride: int
) -> nn.Sequential:
    first = block(inputs, width, stride)
    rest = (block(width * block.expansion, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def resnet18(classes: int = 10, channels: int = 3) -> ResNet:
    """ResNet-18: 11.69 million parameters at 1000 classes."""
    return ResNet(_Basic, (2, 2, 2, 2), classes, channels)


def resnet50(classes: int = 10, channels: int = 3) -> ResNet:
    """ResNet-50: 25.56 million parameters at 1000 classes."""
    return ResNet(_Bottleneck, (3, 4, 6, 3), classes, channels)
