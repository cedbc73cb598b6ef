"""How much the optimisers of a net keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fivefold.parallel.sharded import local
from fivefold.parallel.trees import leaves

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """Of those who train a net, once each has made a step.

    Args:
        net: whose parameters they train.
        device: where what they keep counts.
        changed: is called when there is one more.
    """

    def __init__(
        self, net: nn.Module, device: torch.device, changed: Callable[[], None] | None = None
    ) -> None:
        self._device, self._changed = device, changed
        self._bytes: dict[int, int] = {}
        own, trains = weakref.ref(self), weakref.ref(net)

        def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            alive, trained = own(), trains()
            if alive is not None and trained is not None:
                alive.note(optimizer, trained)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def note(self, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
        """An optimiser has made a step."""
        if id(optimizer) in self._bytes:
            return
        parameters = {id(parameter) for parameter in net.parameters()}
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            state = (local(tensor) for one in optimizer.state.values() for tensor in leaves(one))
            own = (tensor for tensor in state if tensor.device.type == self._device.type)
            self._bytes[id(optimizer)] = sum(tensor.nbytes for tensor in own)
            if self._changed is not None:
                self._changed()

    def bytes_of(self, unknown: int) -> int:
        """Of all of them; `unknown` before any has made a step."""
        return sum(self._bytes.values()) if self._bytes else unknown
