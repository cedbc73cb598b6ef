"""AmoebaNet-D: Real et al. 2018, "Regularized evolution for image classifier architecture search".

The network that pipelines are measured with. Its size follows Huang et al. 2018, "GPipe", table 1:
`layers` normal cells, and `filters`, four times the channels that the network begins with. What a normal
cell concatenates is as in the authors' programs, not as in their figure: only so do the numbers of
parameters in that table come out, to half a percent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["AmoebaNetD", "amoebanet_d"]


@dataclass(frozen=True)
class _Genotype:
    """Which states a cell adds up, and which of them it returns.

    States 0 and 1 are the outputs of the last cell and of the one before; every pair of (operation,
    state) adds one. Those in `returned` are concatenated.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    returned: tuple[int, ...]


_NORMAL = _Genotype(
    (
        (("conv 1x1", 1), ("max 3x3", 1)),
        (("same", 1), ("conv 7x1", 0)),
        (("conv 1x1", 0), ("conv 7x1", 0)),
        (("max 3x3", 2), ("same", 2)),
        (("mean 3x3", 1), ("conv 1x1", 5)),
    ),
    returned=(0, 3, 4, 6),
)
_REDUCTION = _Genotype(
    (
        (("max 2x2", 0), ("max 3x3", 0)),
        (("same", 2), ("conv 3x3", 1)),
        (("conv 7x1", 2), ("max 3x3", 2)),
        (("same", 3), ("max 2x2", 1)),
        (("mean 3x3", 2), ("conv 1x1", 3)),
    ),
    returned=(4, 5, 6),
)


class _Halved(nn.Module):
    """Half the size without a wide kernel: 1x1 convolutions of every second pixel and of those between."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]  # as many rows as x, where these are odd too
        return self.bn(torch.cat((self.even(x), self.odd(shifted)), dim=1))


class _Cell(nn.Module):
    """Two outputs of earlier cells to the concatenation that the genotype asks for."""

    def __init__(
        self, genotype: _Genotype, last: int, before: int, channels: int, *, before_is_larger: bool
    ) -> None:
        super().__init__()
        self.last = _conv(last, channels)
        self.before: nn.Module = nn.Identity()
        if before_is_larger:
            self.before = _Halved(before, channels)
        elif before != channels:
            self.before = _conv(before, channels)
        self.operations = nn.ModuleList(
            _operation(name, channels, stride=2 if genotype is _REDUCTION and state < 2 else 1)
            for pair in genotype.pairs
            for name, state in pair
        )
        self.sources = [state for pair in genotype.pairs for _, state in pair]
        self.returned = genotype.returned

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        results: list[Tensor] = []
        for operation, source in zip(self.operations, self.sources, strict=True):
            results.append(operation(states[source]))
            if len(results) % 2 == 0:
                states.append(results[-2] + results[-1])
        return torch.cat([states[i] for i in self.returned], dim=1)


class AmoebaNetD(nn.Module):
    """`[N, channels, H, W]` images to `[N, classes]` logits; made for 224x224, works from 32x32.

    `layers` is a multiple of 3, and `filters` one of 8.
    """

    def __init__(
        self, classes: int = 10, channels: int = 3, *, layers: int = 18, filters: int = 208
    ) -> None:
        assert not (layers % 3 or filters % 8), (layers, filters)
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        third = [_NORMAL] * (layers // 3)
        order = [_REDUCTION] * 2 + third + [_REDUCTION] + third + [_REDUCTION] + third
        last = before = width
        cells: list[nn.Module] = []
        halved = False
        for genotype in order:
            width *= 2 if genotype is _REDUCTION else 1
            cells.append(_Cell(genotype, last, before, width, before_is_larger=halved))
            last, before = width * len(genotype.returned), last
            halved = genotype is _REDUCTION
        self.cells = nn.ModuleList(cells)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images."""
        last = before = self.stem(x)
        for cell in self.cells:
            last, before = cell(last, before), last
        return self.fc(self.pool(last).flatten(1))


def _conv(
    inputs: int,
    outputs: int,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> nn.Sequential:
    """ReLU, convolution, batch norm: the order of this network."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(outputs))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _conv(channels, narrow),
        _conv(narrow, narrow, (3, 3), (stride, stride)),
        _conv(narrow, channels),
    )


def _conv_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _conv(channels, narrow),
        _conv(narrow, narrow, (1, 7), (1, stride)),
        _conv(narrow, narrow, (7, 1), (stride, 1)),
        _conv(narrow, channels),
    )


def _same(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else _Halved(channels, channels)


_OPERATIONS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "same": _same,
    "conv 1x1": lambda channels, stride: _conv(channels, channels, (1, 1), (stride, stride)),
    "conv 3x3": _conv_3x3,
    "conv 7x1": _conv_7x1,
    # ceil_mode: odd sizes are rounded up, as by everything else here.
    "max 2x2": lambda _, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max 3x3": lambda _, stride: nn.MaxPool2d(3, stride, padding=1),
    "mean 3x3": lambda _, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
}


def _operation(name: str, channels: int, *, stride: int) -> nn.Module:
    return _OPERATIONS[name](channels, stride)


def amoebanet_d(
    classes: int = 10, channels: int = 3, *, layers: int = 18, filters: int = 208
) -> AmoebaNetD:
    """AmoebaNet-D (18, 208): 82 million parameters at 1000 classes."""
    return AmoebaNetD(classes, channels, layers=layers, filters=filters)
