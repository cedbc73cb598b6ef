"""What nets may not do whose layers gather their parameters one after the other, and how that is told.

All ranks have to gather the same at the same time. A rank that calls other modules than the others would get
parameters mixed from two modules, or end the process within the backend; so ranks tell each other what they
are going to gather: some bytes, and on a GPU no wait for it, as the processors tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.trace import Tag

__all__ = ["Order", "explained"]

T = TypeVar("T")

_INSTEAD = 'memory.shard = "optimizer", which gathers for a whole step, works'
_END = 0


class Order:
    """The order in which units are called, which has to be that of all ranks of `replicas`. Collective."""

    def __init__(self, replicas: DeviceMesh) -> None:
        self._group = replicas.get_group("data")
        self._device = torch.device("cpu")
        try:
            self._told(_END)
        except (comm.CommError, RuntimeError):  # all ranks have a backend for GPUs only
            self._device = torch.device(replicas.device_type)

    def hook(self, number: int) -> Callable[[nn.Module, Any], None]:
        """A hook to run before the forward of unit `number`, from 1 on."""

        def check(_module: nn.Module, _inputs: Any) -> None:
            self._check(number)

        return check

    def to_the_end(self, run: Callable[[], T]) -> T:
        """What `run` returns, a forward pass; afterwards no rank calls another unit."""
        made = run()
        self._check(_END)
        return made

    def _check(self, number: int) -> None:
        if bool((self._told(number) != number).any()):
            raise UsageError(
                "ranks call different modules, as their samples differ, or in another order, so they cannot "
                f"gather parameters layer by layer: {_INSTEAD}"
            )

    def _told(self, number: int) -> Tensor:
        own = torch.tensor([number], device=self._device)
        return comm.all_gather(own, self._group, Tag.CONTROL)


_EXPLAINED = {
    "mixed torch.Tensor and DTensor": (
        "the net computes with parameters of a module without calling it, so they were not gathered"
    ),
    "RegisterPostBackwardFunction is a view and is being modified inplace": (
        "a module changes its input in place as the first thing it does, which layers that gather their "
        "parameters cannot allow: set inplace=False there"
    ),
}


@contextmanager
def explained() -> Generator[None]:
    """Errors of torch's within the block that have a remedy here say so."""
    try:
        yield
    except RuntimeError as problem:
        for said, meant in _EXPLAINED.items():
            if said in str(problem):
                raise UsageError(f"{meant}; or {_INSTEAD}") from problem
        raise
