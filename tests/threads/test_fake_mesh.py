"""Meshes without other ranks, for layouts at scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold import comm
from fivefold.errors import PlanError
from fivefold.mesh import Mesh
from fivefold.mesh.fake import fake_mesh
from fivefold.plan import AXES, Layout, Plan
from fivefold.trace import Tag
from ranks import run_ranks

LAYOUT = Layout(data=2, pipe=2, width=2)
ASKED = [("data",), ("width",), ("height",), ("pipe", "width"), ("data", "height", "width"), AXES]


def standing(mesh: Mesh) -> list[Any]:
    """Where a mesh says that its rank stands, and with whom."""
    groups = [*(mesh.group(*axes) for axes in ASKED), mesh.own_group(), mesh.pair_group("data")]
    return [
        [mesh.coordinate(axis) for axis in AXES],
        [(dist.get_process_group_ranks(group), group.rank(), group.size()) for group in groups],
        mesh.share(7),
    ]


def test_a_fake_rank_stands_where_the_real_one_does() -> None:
    for rank, real in enumerate(run_ranks(LAYOUT, standing)):
        with fake_mesh(Plan(layout=LAYOUT), rank) as mesh:
            assert standing(mesh) == real


def test_everything_returns_at_once_and_nothing_stays() -> None:
    layout = Layout(data=8, height=16, width=16)
    with fake_mesh(Plan(layout=layout), 1000) as mesh:
        assert mesh.size == 2048
        group = mesh.own_group("height", "width")
        x = torch.ones(3)
        comm.all_reduce(x, group, Tag.GRADIENTS)
        assert comm.all_gather(x, group, Tag.GRADIENTS).shape == (256, 3)
        comm.broadcast_all([x], group, Tag.GRADIENTS)
        comm.start_messages({0: x}, {1: torch.empty(3)}, group, Tag.HALO).wait()
        torch.testing.assert_close(x, torch.ones(3))
    with pytest.raises(KeyError):  # the group is forgotten
        dist.get_process_group_ranks(group)
    assert not dist.is_initialized()


def test_a_rank_too_many() -> None:
    with (
        pytest.raises(PlanError, match=r"has no rank 8: choose one of 0 to 7"),
        fake_mesh(Plan(layout=LAYOUT), 8),
    ):
        pass
