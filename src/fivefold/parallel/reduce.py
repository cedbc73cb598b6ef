"""Completing gradients: the one interface behind which they are summed over ranks.

`DistributedDataParallel` fills it so far. It averages, so a rank's share of the loss is scaled by the number
of ranks; averaging also leaves gradients of earlier steps alone, which all ranks hold alike, so that
repeated steps accumulate.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import UsageError

__all__ = ["Alone", "Averaged", "Reducer", "explained", "reducer_for"]

# torch 2.13 renamed the option.
_SHARE_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Reducer(Protocol):
    """Runs the net forward so that, after backward, every `.grad` is complete on every rank."""

    @property
    def scale(self) -> float:
        """What a share of the loss is multiplied by before backward, for gradients that are sums."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The net's forward pass."""
        ...


class Alone:
    """One replica: its gradients are complete as they are."""

    scale = 1.0

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The net's forward pass."""
        return self._net(*args, **kwargs)


class _Replica(nn.Module):
    """The net beside a parameter that nothing uses.

    Unused parameters have to be looked for in every step: with a net that nobody rewrote one cannot know
    beforehand, and a bucket that waits for one would never be reduced. DistributedDataParallel writes a
    warning past Python's filters when it looks and finds none; so there is always one.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        some = next(p for p in net.parameters() if p.requires_grad)
        self.net = net
        self.spare = nn.Parameter(some.detach().new_zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


class Averaged:
    """DistributedDataParallel, which averages bucket by bucket while backward still runs."""

    def __init__(self, net: nn.Module, group: dist.ProcessGroup, share_buffers: bool) -> None:
        self.scale = float(group.size())
        options: dict[str, Any] = {_SHARE_BUFFERS: share_buffers}
        self._net = DistributedDataParallel(
            _Replica(net),
            process_group=group,
            find_unused_parameters=True,
            **options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The net's forward pass."""
        return self._net(*args, **kwargs)


@contextmanager
def explained() -> Generator[None]:
    """Around backward: say what to do where DistributedDataParallel cannot follow."""
    try:
        yield
    except RuntimeError as problem:
        if "ready only once" not in str(problem):
            raise
        raise UsageError(
            "a part of the net was checkpointed with use_reentrant=True, which runs a backward pass of its "
            "own inside the backward pass; gradients cannot be summed that way: use_reentrant=False"
        ) from problem


def reducer_for(net: nn.Module, group: dist.ProcessGroup, share_buffers: bool) -> Reducer:
    """The reducer for a net whose replicas are the ranks of `group`.

    `share_buffers`: send the first replica's buffers to the others before every forward pass, as plain
    DistributedDataParallel does; for buffers that would else drift apart.
    """
    trains = any(parameter.requires_grad for parameter in net.parameters())
    if group.size() == 1 or not trains:
        return Alone(net)
    return Averaged(net, group, share_buffers)
