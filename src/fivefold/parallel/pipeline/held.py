"""Which parameters and buffers a rank of a pipe axis holds, and how all of them come together again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.torch_private import own_buffers, own_parameters
from fivefold.trace import Tag

__all__ = ["everywhere", "released"]


def released(net: nn.Module, keep: set[str]) -> None:
    """Give back the memory of what is not in `keep`: meta tensors take its place under the same names."""
    moved: dict[int, Tensor] = {}
    for prefix, module in net.named_modules():
        for kind in (own_parameters(module), own_buffers(module)):
            for name, tensor in kind.items():
                if tensor is None or f"{prefix}.{name}".lstrip(".") in keep:
                    continue
                if id(tensor) not in moved:
                    meta = tensor.detach().to("meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = (
                        nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                    )
                kind[name] = moved[id(tensor)]  # pyright: ignore[reportArgumentType]


def everywhere(
    tensors: Mapping[str, Tensor | None],
    like: Mapping[str, Tensor],
    source: Mapping[str, int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Tensor | None]:
    """Tensors of which each rank of a pipe axis has some, on all of them. Collective over `group`.

    `source` tells for every name which rank's counts, and `like` shape and dtype, meta tensors will do. A
    rank may have None, for a gradient that there is not, and that is what all of them get. All are on
    `device`, also where a rank has none: a group sends those of another in another way.
    """
    found: dict[str, Tensor | None] = dict.fromkeys(tensors)
    for rank in range(group.size()):
        names = [name for name in tensors if source[name] == rank]
        mine = rank == group.rank()
        there = torch.tensor([mine and tensors[name] is not None for name in names], device=device)
        comm.broadcast_all([there], group, Tag.CONTROL, source=rank)
        sent: dict[str, Tensor] = {}
        for name in (
            name for name, is_there in zip(names, there.tolist(), strict=True) if is_there
        ):
            own = tensors[name] if mine else None
            if own is None:
                own = torch.empty_like(like[name], device=device)
            elif own.untyped_storage().nbytes() != own.nbytes:
                # What is sent is written back, which torch refuses for a part of another tensor.
                own = own.clone(memory_format=torch.contiguous_format)
            sent[name] = own.detach()
        comm.broadcast_all(list(sent.values()), group, Tag.CONTROL, source=rank)
        found |= sent
    return found
