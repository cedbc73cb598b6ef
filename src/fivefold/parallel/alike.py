"""Whether replicas still hold the same parameters, which `parallelize` has made equal and steps keep so."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.torch_private import is_dtensor
from fivefold.trace import Tag

__all__ = ["bits_of", "check_alike"]

_SELDOM = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_alike(net: nn.Module, group: dist.ProcessGroup, step: int) -> None:
    """Raise `UsageError` on all ranks of `group` unless they hold the same bits. Collective.

    Compared before the first two steps, and then rarely; `step` counts from 1. Parameters of which a
    rank has a part, or nothing, are left out.
    """
    if step > 2 and step % _SELDOM:
        return
    held = [
        (name, parameter) for name, parameter in net.named_parameters()
        if not (parameter.is_meta or is_dtensor(parameter))
    ]  # fmt: skip
    if group.size() == 1 or not held:
        return
    device = held[0][1].device
    sums = torch.stack([bits_of(parameter).to(device) for _, parameter in held])
    factors = torch.arange(1, len(sums) + 1, device=device)
    said = torch.stack([torch.tensor(len(sums), device=device), (sums * factors).sum()])
    every = comm.all_gather(said, group, Tag.CONTROL)
    if all(torch.equal(one, every[0]) for one in every):
        return
    which = "some"
    if all(one[0] == every[0][0] for one in every):
        rows = torch.stack(list(comm.all_gather(sums, group, Tag.CONTROL)))
        apart = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        which = repr(held[apart[0]][0]) + f" and {len(apart) - 1} more" * (len(apart) > 1)
    raise UsageError(
        f"replicas hold different parameters before step {step}: {which}. parallelize makes them equal, "
        "once; what changes them afterwards, load_state_dict or new layers, say, has to do the same on every "
        "rank: load on all of them, and draw from generators that have drawn alike (torch.manual_seed before)"
    )


def bits_of(tensor: Tensor) -> Tensor:
    """The sum of its bits, int64 (), which is the same in every order."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
