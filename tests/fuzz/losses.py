"""Losses from their specification: torch's, and such as users write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.nets import main_output

__all__ = ["LOSSES", "TARGETS", "build"]

Loss = Callable[[Any, Any], Tensor]


class Masked:
    """Mean square error where the target is positive, by shares."""

    def share(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        known = targets > 0
        apart = torch.where(known, main_output(outputs) - targets, 0.0)
        return apart.square().sum(), known.sum()

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        numerator, denominator = self.share(outputs, targets)
        return numerator / denominator


class Annealed:
    """A loss with a weight that the training loop lowers, and a count of its calls."""

    def __init__(self) -> None:
        self.weight, self.calls = 1.0, 0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        self.calls += 1
        return self.weight * F.mse_loss(main_output(outputs), targets)


class Trained(nn.Module):
    """A loss with a parameter of its own: a learned weight with its penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.3))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(main_output(outputs), targets) * torch.exp(-self.level) + self.level


class Remembering(nn.Module):
    """A loss with a buffer that it changes: a running scale of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(targets.abs().mean(), alpha=0.1)
        return F.mse_loss(main_output(outputs), targets) / self.scale


class Counting(nn.Module):
    """A loss that counts its calls in a buffer, and weighs by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(main_output(outputs), targets) * (1.0 + 0.1 * self.calls)


def _in_place(outputs: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(main_output(outputs).mul_(0.5), targets)


def _one_element(outputs: Any, targets: Tensor) -> Tensor:
    """Of shape (1,)."""
    return F.mse_loss(main_output(outputs), targets).reshape(1)


def _relative(outputs: Any, targets: Tensor) -> Tensor:
    """Not a mean over samples."""
    return (main_output(outputs) - targets).norm() / (targets.norm() + 1.0)


def _overlap(outputs: Any, targets: Tensor) -> Tensor:
    """One minus the overlap of masks (dice) over the whole batch."""
    found = main_output(outputs).sigmoid()
    return 1.0 - (2.0 * (found * targets).sum() + 1.0) / (found.sum() + targets.sum() + 1.0)


def _contrast(outputs: Any, targets: Tensor) -> Tensor:
    """Every sample against all others."""
    out = F.normalize(main_output(outputs).flatten(1), dim=1)
    goal = F.normalize(targets.flatten(1), dim=1)
    return F.cross_entropy(out @ goal.t() * 3.0, torch.arange(len(out)))


def _flat(outputs: Any, targets: Tensor) -> Tensor:
    """Tokens as rows, as language models do."""
    out = main_output(outputs)
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), targets.reshape(-1))


def _both(outputs: Any, targets: Tensor) -> Tensor:
    """Of the main output and of what comes with it."""
    side = outputs if isinstance(outputs, Tensor) else _side(outputs)
    return F.mse_loss(main_output(outputs), targets) + 0.1 * side.square().mean()


def _side(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        return outputs.get("side", outputs["out"])
    return outputs[1] if isinstance(outputs, tuple | list) else outputs.side


def _by_sample(outputs: Any, targets: Tensor) -> Tensor:
    """A mean over samples of something that is not linear in a sample's elements."""
    apart = (main_output(outputs) - targets).flatten(1)
    return apart.norm(dim=1).mean()


def _penalty(net: nn.Module) -> Loss:
    def penalised(outputs: Any, targets: Tensor) -> Tensor:
        norms = [p.square().sum() for p in net.parameters() if p.requires_grad]
        return F.mse_loss(main_output(outputs), targets) + 0.01 * torch.stack(norms).sum()

    return penalised


def _auxiliary(net: nn.Module) -> Loss:
    def with_aux(outputs: Any, targets: Tensor) -> Tensor:
        left = [m.aux for m in net.modules() if getattr(m, "aux", None) is not None]
        return F.mse_loss(main_output(outputs), targets) + sum(left, torch.zeros(()))

    return with_aux


def _picked(loss: Loss) -> Loss:
    def of_main(outputs: Any, targets: Tensor) -> Tensor:
        return loss(main_output(outputs), targets)

    return of_main


def _weights(classes: int) -> Tensor:
    return torch.linspace(0.2, 2.0, classes)


LOSSES: dict[str, tuple[str, Callable[[dict[str, Any], nn.Module], Loss]]] = {
    "ce": ("classes", lambda _s, _n: nn.CrossEntropyLoss()),
    "ce_weighted": ("classes", lambda s, _n: nn.CrossEntropyLoss(weight=_weights(s["classes"]))),
    "ce_ignored": ("classes", lambda _s, _n: nn.CrossEntropyLoss(ignore_index=1)),
    "ce_smooth": (
        "classes",
        lambda _s, _n: functools.partial(F.cross_entropy, label_smoothing=0.1),
    ),
    "ce_sum": ("classes", lambda _s, _n: nn.CrossEntropyLoss(reduction="sum")),
    "ce_soft": ("shares", lambda _s, _n: nn.CrossEntropyLoss()),
    "mse": ("like", lambda _s, _n: nn.MSELoss()),
    "mse_sum": ("like", lambda _s, _n: nn.MSELoss(reduction="sum")),
    "mse_function": ("like", lambda _s, _n: F.mse_loss),
    "smooth_l1": ("like", lambda _s, _n: nn.SmoothL1Loss(beta=0.5)),
    "huber": ("like", lambda _s, _n: nn.HuberLoss()),
    "bce": ("binary", lambda _s, _n: nn.BCEWithLogitsLoss()),
    "soft_margin": ("signs", lambda _s, _n: nn.SoftMarginLoss()),
    "poisson": ("positive", lambda _s, _n: nn.PoissonNLLLoss()),
    "masked": ("like", lambda _s, _n: Masked()),
    "annealed": ("like", lambda _s, _n: Annealed()),
    "trained": ("like", lambda _s, _n: Trained()),
    "remembering": ("like", lambda _s, _n: Remembering()),
    "counting": ("like", lambda _s, _n: Counting()),
    "in_place": ("like", lambda _s, _n: _in_place),
    "one_element": ("like", lambda _s, _n: _one_element),
    "relative": ("like", lambda _s, _n: _relative),
    "overlap": ("binary", lambda _s, _n: _overlap),
    "contrast": ("like", lambda _s, _n: _contrast),
    "flat": ("tokens", lambda _s, _n: _flat),
    "both": ("like", lambda _s, _n: _both),
    "by_sample": ("like", lambda _s, _n: _by_sample),
    "penalty": ("like", lambda _s, n: _penalty(n)),
    "auxiliary": ("like", lambda _s, n: _auxiliary(n)),
}
"""name -> (what targets look like, how it is made)"""

TORCH = tuple(name for name in LOSSES if list(LOSSES).index(name) <= list(LOSSES).index("poisson"))
"""those of torch, which take one tensor"""

TARGETS = {name: kind for name, (kind, _) in LOSSES.items()}


def build(told: dict[str, Any], net: nn.Module) -> Loss:
    """The loss of a case. One of torch's, where the net returns more than a tensor, is given the main one."""
    made = LOSSES[told["name"]][1](told, net)
    return _picked(made) if told.get("picked") else made
