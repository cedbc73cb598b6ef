"""Whether the instances of a device have room for a net there, as far as that is known before a step."""

from __future__ import annotations

import torch
from torch import nn

from fivefold import comm
from fivefold.arena.budget import available_bytes
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import AXES
from fivefold.trace import Tag

__all__ = ["check_room"]


def check_room(net: nn.Module, mesh: Mesh) -> None:
    """Raise `UsageError` on all ranks if a device has no room for weights and gradients in all its instances.

    Nets that are divided are not looked at. Collective.
    """
    each = mesh.plan.instances.per_device
    if each == 1 or mesh.predicts or mesh.layout.pipe > 1 or mesh.plan.memory.shard != "none":
        return
    every = [p for p in net.parameters() if not p.is_meta]
    weights = sum(p.nbytes for p in every)
    gradients = sum(p.nbytes for p in every if p.requires_grad)
    kind = mesh.device.type
    free = available_bytes() if kind == "cpu" else torch.cuda.mem_get_info(mesh.device)[0]
    # With fewer instances, the weights of the others would not be there.
    there = sum(p.nbytes for p in every if p.device.type == kind)
    told = torch.tensor([free + each * there], device=mesh.device)
    room = int(comm.all_gather(told, mesh.group(*AXES), Tag.CONTROL).min())
    fit = room // max(1, weights + gradients)
    if fit < each:
        raise UsageError(
            f"instances.per_device = {each}: weights and gradients of this net take "
            f"{(weights + gradients) / (1 << 20):,.0f} MiB in each process, and a device has "
            f"{room / (1 << 20):,.0f} MiB, so {'none fits' if fit < 1 else f'no more than {fit} fit'}"
        )
