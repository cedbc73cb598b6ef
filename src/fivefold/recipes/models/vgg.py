"""VGG-16 with batch norm: Simonyan and Zisserman 2014, "Very deep convolutional networks", table 1, D.

State_dict keys as torchvision has them, so its weights load. The classifier has dropout, and most of the
parameters: 103 million of them see the 7x7 average. For small images `pool=1`, a global average, leaves
2 million of these.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["Vgg", "vgg16_bn"]

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # width as a multiple of the first, convolutions


class Vgg(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32.

    Args:
        classes: how many logits.
        channels: of the images.
        width: channels of the first stage.
        hidden: neurons of the two hidden layers of the classifier.
        pool: height and width of the average that the classifier sees.
        dropout: share of the hidden neurons.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        width: int = 64,
        hidden: int = 4096,
        pool: int = 7,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for multiple, convolutions in _STAGES:
            for _ in range(convolutions):
                layers += _conv(inputs, multiple * width)
                inputs = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * pool**2, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def _conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def vgg16_bn(
    classes: int = 10,
    channels: int = 3,
    *,
    width: int = 64,
    hidden: int = 4096,
    pool: int = 7,
    dropout: float = 0.5,
) -> Vgg:
    """VGG-16 with batch norm: 138.37 million parameters at 1000 classes."""
    return Vgg(classes, channels, width=width, hidden=hidden, pool=pool, dropout=dropout)
