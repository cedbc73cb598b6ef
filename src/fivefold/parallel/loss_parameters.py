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
    """Those of a loss, equal on all ranks. Collective."""

    def __init__(self, own: list[nn.Parameter], mesh: Mesh) -> None:
        self._own = own
        self._gradients = StageGradients(lambda: own, mesh.group(*AXES))

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
    """What a loss on several ranks has besides the net's; None if there is nothing to train."""
    if mesh.size == 1 or not isinstance(loss, nn.Module):
        return None
    of_net = {id(parameter) for parameter in net.parameters()}
    own = [p for p in loss.parameters() if id(p) not in of_net]
    return LossParameters(own, mesh) if any(p.requires_grad for p in own) else None
