"""Parameters that a loss has of its own: a learned temperature, weights of several terms.

Every rank's share of the loss gives them a share of their gradient, wherever the net lies; so they are summed
over all ranks, at the end of a step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.pipeline.gradients import StageGradients
from fivefold.plan import AXES

__all__ = ["LossParameters", "loss_parameters"]


class LossParameters:
    """Of a loss, what is no parameter of the net. Ranks have agreed on their numbers. Collective."""

    def __init__(self, loss: nn.Module, net: nn.Module, mesh: Mesh) -> None:
        of_net = {id(parameter) for parameter in net.parameters()}
        self._own = [p for p in loss.parameters() if id(p) not in of_net]
        self._gradients = StageGradients(self._own, mesh.group(*AXES))

    def begin(self) -> None:
        """Start a step."""
        self._gradients.begin()

    def finish(self, scale: Tensor | None = None, *, counted: bool = True) -> None:
        """End a step: sum the gradients over all ranks, and scale them. Collective.

        Unless `counted`, this rank has no samples, and adds nothing.
        """
        if not counted:
            for parameter in self._own:
                parameter.grad = None
        self._gradients.launch()
        self._gradients.finish(scale)


def loss_parameters(loss: Any, net: nn.Module, mesh: Mesh) -> LossParameters | None:
    """Those of a loss on several ranks; None if there are none to train."""
    if mesh.size == 1 or not isinstance(loss, nn.Module):
        return None
    of_net = {id(parameter) for parameter in net.parameters()}
    trains = any(p.requires_grad and id(p) not in of_net for p in loss.parameters())
    return LossParameters(loss, net, mesh) if trains else None
