"""Groups of a mesh, each with the time that its operations, and its making, wait for ranks that do not come.

torch gives the groups of `init_device_mesh` its own 30 minutes and takes no other, so they are made here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.comm import BACKEND
from fivefold.plan import AXES, Layout
from fivefold.torch_private import backend_of_device

__all__ = ["cpu_groups", "lines", "named_mesh", "subgroup"]


def named_mesh(device: torch.device, layout: Layout, timeout_s: float) -> DeviceMesh:
    """Torch's view of a layout on devices like this rank's, its dims named like the axes. Collective."""
    ranks = torch.arange(layout.size, dtype=torch.int).view(layout.sizes)
    groups = [
        subgroup(lines(ranks, [axis]).tolist(), timeout_s, device, f"mesh_{axis}") for axis in AXES
    ]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=AXES)


def lines(ranks: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Ranks that differ along `axes` only, a row each; rows ordered by the other axes, `pipe` first."""
    inner = sorted({AXES.index(axis) for axis in axes})
    pipe = AXES.index("pipe")
    outer = sorted((dim for dim in range(len(AXES)) if dim not in inner), key=lambda d: d != pipe)
    size = math.prod(ranks.shape[dim] for dim in inner)
    return ranks.permute(*outer, *inner).reshape(-1, size)


def subgroup(
    enumerated: Sequence[list[int]],
    timeout_s: float,
    device: torch.device,
    use: str | None = None,
    *,
    fresh: bool = False,
) -> dist.ProcessGroup:
    """The one of some groups, which together hold all ranks, that this rank is in. Collective.

    It is ready for tensors on `device`. All ranks in one are torch's default group, unless it must be a
    `fresh` one.
    """
    if len(enumerated) == 1 and not fresh:
        assert dist.group.WORLD is not None, "torch.distributed runs"
        mine = dist.group.WORLD
    else:
        timeout = timedelta(seconds=timeout_s)
        mine, _ = dist.new_subgroups_by_enumeration([*enumerated], timeout, group_desc=use)
        assert isinstance(mine, dist.ProcessGroup), "every rank is in one of them"
    if device.type != "cpu" and mine.name() == BACKEND:
        # The backend fivefold makes a group of torch's own for a GPU when it is first asked for one, and
        # waits for the others: in the middle of a step they may wait for a message of this rank.
        backend_of_device(mine, device)
    return mine


def cpu_groups(
    group: dist.ProcessGroup | None, count: int, timeout_s: float
) -> list[dist.ProcessGroup | None]:
    """New gloo groups of the ranks of `group`; of all ranks without one. Collective over these ranks.

    None each where torch.distributed is not running: the process is alone then.
    """
    if not dist.is_initialized():
        return [None] * count
    everyone = group is None or group.size() == dist.get_world_size()
    ranks = None if group is None else dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=timeout_s)
    made: list[dist.ProcessGroup | None] = []
    for _ in range(count):
        # Ranks outside of a smaller group do not take part, so names must not depend on a common count.
        fresh = (
            dist.new_group(None, timeout, "gloo")
            if everyone
            else dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        )
        assert isinstance(fresh, dist.ProcessGroup), "this rank is in it"
        made.append(fresh)
    return made
