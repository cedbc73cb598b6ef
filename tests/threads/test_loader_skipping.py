"""Training where some samples cannot be read: every layout leaves out the same and computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from ranks import run_ranks

BAD = {1, 2, 3, 10}


class Images:
    """Fourteen images and classes, of which some are damaged."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(14, 3, 8, 8, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in BAD:
            raise OSError(f"image {index} is damaged")
        return self.images[index], index % 3


@pytest.mark.filterwarnings("ignore::fivefold.errors.DataWarning")
@pytest.mark.parametrize(
    "layout", [Layout(data=2), Layout(data=3), Layout(height=2), Layout(pipe=2)], ids=str
)
def test_training_equals_one_process(layout: Layout) -> None:
    """Batches of 5, in order: in the first, a rank of three has nothing left at all."""
    torch.manual_seed(0)
    # Statistics of micro-batches, as a pipeline has them, are others.
    norm = nn.BatchNorm2d(4) if layout.pipe == 1 else nn.GroupNorm(2, 4)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).double()  # fmt: skip

    def train(mesh: Mesh) -> dict[str, Tensor]:
        example = torch.empty(5, 3, 8, 8, dtype=torch.float64, device="meta")
        model = ff.parallelize(
            copy.deepcopy(net), mesh, example=example, loss=nn.CrossEntropyLoss()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ff.loader(Images(), mesh, batch_size=5, shuffle=False, on_error="skip")
        for x, y in data:
            model.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    (alone,) = run_ranks(Layout(), train)
    for weights in run_ranks(layout, train):
        for name, expected in weights.items():
            torch.testing.assert_close(alone[name], expected, rtol=1e-10, atol=1e-12)
