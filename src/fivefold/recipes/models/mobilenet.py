"""MobileNetV2: Sandler et al. 2018, "Inverted residuals and linear bottlenecks", table 2.

State_dict keys as torchvision has them, so its weights load. The classifier has dropout.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["MobileNetV2", "mobilenet_v2"]

_STAGES = (  # expansion, output channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _InvertedResidual(nn.Module):
    """Widen (1x1), convolve each channel alone (3x3), narrow (1x1, no activation)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [_conv(inputs, wide, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _conv(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32."""

    def __init__(self, classes: int = 10, channels: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(channels, 32, 3, stride=2)]
        inputs = 32
        for expansion, outputs, blocks, stride in _STAGES:
            for block in range(blocks):
                step = stride if block == 0 else 1
                layers.append(_InvertedResidual(inputs, outputs, step, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, _conv(inputs, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        return self.classifier(self.features(x).mean((2, 3)))


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def mobilenet_v2(classes: int = 10, channels: int = 3) -> MobileNetV2:
    """MobileNetV2: 3.50 million parameters at 1000 classes."""
    return MobileNetV2(classes, channels)
