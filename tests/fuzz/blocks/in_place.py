"""Writing into tensors: views, regions, masks, `out=`, `.data`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, register

WAYS = (
    "view", "chunk", "region", "region_of_zeros", "channel", "masked", "masked_fill", "out", "data",
    "index_put", "augmented", "copied", "transposed", "empty", "several", "set_rows", "first_row",
    "other_rows", "row_mask", "parameter_row", "last_element", "diagonal",
)  # fmt: skip


@register
class Written(Block):
    often = 4.0

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.shape, self.way = shape, way
        self.gain = nn.Parameter(torch.tensor([1.2]))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.way}")(x * self.gain)

    def _region(self, y: Tensor) -> Tensor:
        y[..., :1] = y[..., 1:2] * 0.5
        return y

    def _region_of_zeros(self, y: Tensor) -> Tensor:
        made = torch.zeros_like(y)
        made[..., 1:] = y[..., :-1]
        return made + y

    def _channel(self, y: Tensor) -> Tensor:
        first = y.select(self.shape.dim, 0)
        first.add_(y.select(self.shape.dim, -1).detach())
        return y

    def _masked(self, y: Tensor) -> Tensor:
        y = y.clone()
        y[y < 0] = 0.1
        return y

    def _index_put(self, y: Tensor) -> Tensor:
        y = y.clone()
        y[torch.arange(y.shape[0]), 0] = 0.5
        return y

    def _empty(self, y: Tensor) -> Tensor:
        made = torch.empty(y.shape, dtype=y.dtype)
        made.copy_(y.detach())
        return made + y

    def _set_rows(self, y: Tensor) -> Tensor:
        made = torch.zeros_like(y)
        for row in range(y.shape[0]):
            made[row] = y[row] * 2.0
        return made

    def _first_row(self, y: Tensor) -> Tensor:
        y[0] = 0.5
        return y

    def _other_rows(self, y: Tensor) -> Tensor:
        y = y.clone()
        y[::2] = 0.25
        return y

    def _row_mask(self, y: Tensor) -> Tensor:
        mask = torch.ones_like(y)
        mask[0] = 0
        return y * mask

    def _parameter_row(self, y: Tensor) -> Tensor:
        y = y.clone()
        y[-1] = self.gain
        return y

    def _last_element(self, y: Tensor) -> Tensor:
        y[-1, ..., 0] = 0.5
        return y

    def _diagonal(self, y: Tensor) -> Tensor:
        return y.clone().fill_diagonal_(0.25) if y.dim() == 2 else y.tanh()

    def _view(self, y: Tensor) -> Tensor:
        y.flatten(1).mul_(0.5)
        return y

    def _chunk(self, y: Tensor) -> Tensor:
        first = y.split(1, self.shape.dim)[0]
        first *= 2.0
        return y

    def _masked_fill(self, y: Tensor) -> Tensor:
        return y.masked_fill_(y > 0.5, 0.3)

    def _out(self, y: Tensor) -> Tensor:
        made = torch.empty_like(y)
        with torch.no_grad():
            torch.mul(y, 0.5, out=made)
        return y + made

    def _data(self, y: Tensor) -> Tensor:
        z = y.tanh()
        z.data = z.data * 0.5
        return z + y

    def _augmented(self, y: Tensor) -> Tensor:
        y[..., ::2] *= 2.0
        return y

    def _copied(self, y: Tensor) -> Tensor:
        z = torch.zeros_like(y)
        z.copy_(y)
        return z * 2.0

    def _transposed(self, y: Tensor) -> Tensor:
        y.transpose(0, 1).add_(1.0)
        return y

    def _several(self, y: Tensor) -> Tensor:
        return y.clamp_(min=-0.3).add_(0.1).sub_(torch.ones(()))

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"way": rng.choice(WAYS)}
