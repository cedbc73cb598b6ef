"""ResNet-18 and ResNet-50: He et al. 2015, "Deep residual learning", table 1.

As torchvision has them, with equal state_dict keys, so its weights load: the bottleneck strides in
its 3x3 convolution ("v1.5"), and changes of shape are projected by a 1x1 convolution (option B).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["ResNet", "Trunk", "bottleneck_trunk", "initialise", "resnet18", "resnet34", "resnet50"]


class _Basic(nn.Module):
    """3x3, 3x3, and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dilation: int = 1) -> None:
        assert dilation == 1, "only the bottleneck can be dilated"
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

    def __init__(self, inputs: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
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


class Trunk(nn.Module):
    """Images to the features of the last layer, `[N, features, H, W]`, a 32nd of the images' size.

    Args:
        block: what the layers are made of.
        blocks: how many in each of the four layers.
        channels: of the images.
        width: channels of the first layer's 3x3 convolutions.
        dilated: the last so many layers keep the size and dilate their 3x3 convolutions instead, the
            first block of each still as the layer before it (Chen et al. 2017, section 3.1).
    """

    def __init__(
        self,
        block: type[_Basic | _Bottleneck],
        blocks: Sequence[int],
        channels: int = 3,
        *,
        width: int = 64,
        dilated: int = 0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        make = _Layers(block, width, dilated)
        self.layer1 = make(blocks[0])
        self.layer2 = make(blocks[1])
        self.layer3 = make(blocks[2])
        self.layer4 = make(blocks[3])
        self.features = make.inputs

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class _Layers:
    """Makes layer after layer, each twice as wide as the one before and, but for the first, half as large."""

    def __init__(self, block: type[_Basic | _Bottleneck], width: int, dilated: int) -> None:
        self.inputs = self.width = width
        self.block, self.plain = block, 4 - dilated
        self.stride = self.dilation = 1

    def __call__(self, blocks: int) -> nn.Sequential:
        before = self.dilation
        if self.plain <= 0:
            self.stride, self.dilation = 1, 2 * self.dilation
        first = self.block(self.inputs, self.width, self.stride, before)
        self.inputs = self.width * self.block.expansion
        rest = [self.block(self.inputs, self.width, 1, self.dilation) for _ in range(blocks - 1)]
        self.width, self.stride, self.plain = 2 * self.width, 2, self.plain - 1
        return nn.Sequential(first, *rest)


class ResNet(Trunk):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32."""

    def __init__(
        self,
        block: type[_Basic | _Bottleneck],
        blocks: Sequence[int],
        classes: int = 10,
        channels: int = 3,
        *,
        width: int = 64,
    ) -> None:
        super().__init__(block, blocks, channels, width=width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.features, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        return self.fc(self.avgpool(super().forward(x)).flatten(1))


def initialise(net: nn.Module) -> None:
    """Draw the weights of all convolutions anew, as He et al. 2015, "Delving deep", have them."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def bottleneck_trunk(
    blocks: Sequence[int], channels: int = 3, *, width: int = 64, dilated: int = 0
) -> Trunk:
    """A trunk of bottlenecks, not yet initialised: what networks for other tasks are built on."""
    return Trunk(_Bottleneck, blocks, channels, width=width, dilated=dilated)


def resnet18(classes: int = 10, channels: int = 3, *, width: int = 64) -> ResNet:
    """ResNet-18: 11.69 million parameters at 1000 classes."""
    return ResNet(_Basic, (2, 2, 2, 2), classes, channels, width=width)


def resnet34(classes: int = 10, channels: int = 3, *, width: int = 64) -> ResNet:
    """ResNet-34: 21.80 million parameters at 1000 classes."""
    return ResNet(_Basic, (3, 4, 6, 3), classes, channels, width=width)


def resnet50(classes: int = 10, channels: int = 3, *, width: int = 64) -> ResNet:
    """ResNet-50: 25.56 million parameters at 1000 classes."""
    return ResNet(_Bottleneck, (3, 4, 6, 3), classes, channels, width=width)
