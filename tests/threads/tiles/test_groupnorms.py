"""Norms of single samples over tiles: outputs, gradients and running buffers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.program.program import Program
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


def _body(*norms: nn.Module) -> nn.Module:
    """Something in front whose gradients tell whether those of the norm are right."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *norms)


class Plain(nn.Module):
    """The functional calls, without parameters."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            F.group_norm(x, 1),
            F.instance_norm(x),
            F.layer_norm(x, x.shape[1:]),
            F.layer_norm(x, x.shape[-1:]),
            F.rms_norm(x, x.shape[-2:], eps=1e-4),
            torch.group_norm(x, 3, None, None, 1e-3),
            torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        ]


class EvalInstanceNorm(nn.InstanceNorm2d):
    """In evaluation: with its running statistics."""

    def __init__(self) -> None:
        super().__init__(6, affine=True, track_running_stats=True)
        assert self.running_mean is not None
        self.running_mean.uniform_(-1, 1)
        self.eval()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norms_of_samples_are_those_of_the_whole_image(layout: Layout) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True, momentum=0.3),
        nn.Tanh(),
        nn.LayerNorm((6, 11, 7)),
        nn.Tanh(),
        nn.InstanceNorm2d(6),
        nn.LayerNorm((11, 7), bias=False),
        nn.RMSNorm((11, 7)),
        EvalInstanceNorm(),
    )
    expect_tiles(net, (2, 3, 11, 7), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_functional_norms(layout: Layout) -> None:
    expect_tiles(Plain(), (2, 3, 11, 7), layout)


def test_norms_of_volumes() -> None:
    net = nn.Sequential(
        nn.GroupNorm(1, 3),
        nn.InstanceNorm3d(3, affine=True, track_running_stats=True),
        nn.LayerNorm((7, 4)),
        nn.LayerNorm(4),
    )
    expect_tiles(net, (2, 3, 5, 7, 4), Layout(depth=2, height=2))


def test_norms_of_lines() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    expect_tiles(nn.Sequential(nn.Conv1d(3, 4, 3), norm), (3, 3, 11), Layout(width=2))


def _has_margins(program: Program) -> None:
    assert any(spread != spread.tight() for spread in program.spreads.values())


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(2, 6),
        nn.InstanceNorm2d(6, affine=True),
        nn.LayerNorm((6, 7, 5)),
        nn.LayerNorm(5),
        nn.RMSNorm((7, 5)),
        nn.BatchNorm2d(6),
    ],
    ids=repr,
)
def test_margins_are_normalised_but_do_not_count(norm: nn.Module) -> None:
    net = _body(norm, nn.Conv2d(6, 2, 3, padding=1))
    expect_tiles(net, (2, 3, 7, 5), Layout(height=2, width=2), fuse=4, check=_has_margins)
