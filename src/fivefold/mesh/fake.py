"""A mesh without other ranks: to find out what a rank would do, or how much memory it would need.

    with fake_mesh(Plan(layout=Layout(height=8, width=8)), rank=27) as mesh:
        ...                                          # rank 27 of 64, alone in this process

Its groups take everything and bring nothing: a collective returns at once and leaves its tensors as they are.
Torch's default group is neither needed nor touched, so a fake mesh may stand beside a real one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.errors import PlanError, UsageError
from fivefold.mesh.mesh import Mesh
from fivefold.plan import AXES, Plan
from fivefold.torch_private import fake_group, world

__all__ = ["fake_mesh"]

_numbers = itertools.count()


@contextmanager
def fake_mesh(plan: Plan, rank: int, device: str | torch.device = "cpu") -> Generator[Mesh]:
    """The mesh that rank `rank` of `plan.layout` would have. Its groups end with the block.

    Raises `PlanError` for a rank that the layout does not have.
    """
    layout, where = plan.layout, torch.device(device)
    if not 0 <= rank < layout.size:
        raise PlanError(
            f"the layout {layout} has no rank {rank}: choose one of 0 to {layout.size - 1}"
        )
    ranks = torch.arange(layout.size, dtype=torch.int).view(layout.sizes)
    named = DeviceMesh(where.type, ranks, mesh_dim_names=AXES, _init_backend=False, _rank=rank)
    mesh = _FakeMesh(plan, layout, rank, layout.size, where, named, owns_world=False, predicts=True)
    try:
        yield mesh
    finally:
        for group in mesh.made:
            del world().pg_group_ranks[group]


@dataclass
class _FakeMesh(Mesh):
    made: list[dist.ProcessGroup] = field(default_factory=list[dist.ProcessGroup], repr=False)

    def coordinate(self, axis: str) -> int:
        inner = self.layout.sizes[AXES.index(axis) :]
        return self.rank % math.prod(inner) // math.prod(inner[1:])

    def group(self, *axes: str) -> dist.ProcessGroup:
        wanted = tuple(axis for axis in AXES if axis in axes)
        if wanted not in self._joint:
            self._joint[wanted] = self.own_group(*wanted)
        return self._joint[wanted]

    def own_replicas(self) -> DeviceMesh:
        raise UsageError(
            "what a rank does or needs is not predicted for replicas that divide parameters: ask with "
            'memory.shard = "none"'
        )

    def _new_group(self, enumerated: list[list[int]]) -> dist.ProcessGroup:
        mine = next(ranks for ranks in enumerated if self.rank in ranks)
        group = fake_group(mine.index(self.rank), len(mine), f"fake {next(_numbers)}")
        # Messages look up there which rank of the job a rank of a group is.
        world().pg_group_ranks[group] = {rank: place for place, rank in enumerate(mine)}
        self.made.append(group)
        return group
