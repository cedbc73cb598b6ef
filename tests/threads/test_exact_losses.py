"""Losses of every kind under layouts that divide the batch badly: no mean of means is the mean."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from ranks import run_ranks
from zoo import CLASSES, LAYOUTS, VECTOR, Call, Case, expect_exact, flat


class Unused(nn.Module):
    """A head that the forward pass leaves out, and one whose output the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main = nn.Linear(5, 8), nn.Linear(8, CLASSES)
        self.never, self.aside = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.body(x))
        return {"main": self.main(x), "aside": self.aside(x)}


class MainOnly(nn.Module):
    """A loss that says how to share itself."""

    def forward(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["main"], targets)

    def share(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(outputs["main"], targets, reduction="sum")
        return each, torch.tensor(float(targets.shape[0]))


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares every sample with every other one of the whole batch."""
    directions = F.normalize(outputs, dim=1)
    alike = (targets[:, None] == targets[None]).to(outputs.dtype)
    return (directions @ directions.T - alike).square().mean() + outputs.std()


def both(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["main"], targets) + outputs["aside"].square().mean().sqrt()


def spatial(net: nn.Module) -> nn.Module:
    """Dense prediction: a class for every pixel."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), net, nn.Conv2d(6, CLASSES, 1))


def per_pixel(n: int) -> Tensor:
    targets = torch.randint(0, CLASSES, (n, 6, 5))
    targets[torch.rand(n, 6, 5) < 0.3] = -100
    return targets


def with_ignored(n: int) -> Tensor:
    targets = torch.randint(0, CLASSES, (n,))
    targets[0] = 2  # where only the first rank has something to learn
    targets[1:3] = -100
    return targets


def probabilities(n: int) -> Tensor:
    return torch.softmax(torch.randn(n, CLASSES), 1)


def likewise(n: int) -> Tensor:
    return torch.randn(n, CLASSES)


def binary(n: int) -> Tensor:
    return torch.randint(0, 2, (n, CLASSES)).float()


def signs(n: int) -> Tensor:
    return binary(n) * 2 - 1


WEIGHTS = torch.tensor([0.3, 1.0, 2.5, 0.1])


def on_vectors(loss: Callable[..., Any], targets: Callable[[int], Any], *end: nn.Module) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(flat(8, nn.BatchNorm1d(8), nn.ReLU()), *end)

    return Case(build, targets=targets, loss=loss, **VECTOR)


def on_pixels(loss: Callable[..., Any]) -> Case:
    return Case(lambda: spatial(nn.BatchNorm2d(6)), targets=per_pixel, loss=loss)


def labels(n: int) -> Tensor:
    return torch.randint(0, CLASSES, (n,))


LOSSES: dict[str, Case] = {
    "class weights": on_vectors(nn.CrossEntropyLoss(weight=WEIGHTS), labels),
    "ignored targets": on_vectors(nn.CrossEntropyLoss(), with_ignored),
    "class weights, ignored, smoothed": on_vectors(
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), with_ignored
    ),
    "another ignore_index": on_vectors(nn.CrossEntropyLoss(ignore_index=2), labels),
    "label smoothing": on_vectors(nn.CrossEntropyLoss(label_smoothing=0.2), labels),
    "summed": on_vectors(nn.CrossEntropyLoss(reduction="sum"), labels),
    "probabilities": on_vectors(nn.CrossEntropyLoss(), probabilities),
    "weighted probabilities": on_vectors(
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), probabilities
    ),
    "pixels": on_pixels(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "pixels, summed": on_pixels(nn.CrossEntropyLoss(reduction="sum")),
    "pixels, smoothed": on_pixels(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "negative log-likelihood": on_vectors(
        nn.NLLLoss(weight=WEIGHTS), with_ignored, nn.LogSoftmax(1)
    ),
    "mean square": on_vectors(nn.MSELoss(), likewise),
    "sum of squares": on_vectors(nn.MSELoss(reduction="sum"), likewise),
    "absolute": on_vectors(nn.L1Loss(), likewise),
    "smooth absolute": on_vectors(nn.SmoothL1Loss(beta=0.3), likewise),
    "huber": on_vectors(nn.HuberLoss(delta=0.3), likewise),
    "binary with logits": on_vectors(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), binary),
    "weighted binary with logits": on_vectors(
        nn.BCEWithLogitsLoss(weight=WEIGHTS, reduction="sum"), binary
    ),
    "binary": on_vectors(nn.BCELoss(), binary, nn.Sigmoid()),
    "divergence per sample": on_vectors(
        nn.KLDivLoss(reduction="batchmean"), probabilities, nn.LogSoftmax(1)
    ),
    "divergence": on_vectors(nn.KLDivLoss(reduction="sum"), probabilities, nn.LogSoftmax(1)),
    "poisson": on_vectors(nn.PoissonNLLLoss(full=True), binary),
    "soft margin": on_vectors(nn.SoftMarginLoss(), signs),
    "hinge": on_vectors(nn.HingeEmbeddingLoss(), signs),
    "multi margin": on_vectors(nn.MultiMarginLoss(weight=WEIGHTS), labels),
    "multi label margin": on_vectors(
        nn.MultiLabelMarginLoss(), lambda n: torch.tensor([[1, 3, -1, 0]]).expand(n, -1).clone()
    ),
    "multi label soft margin": on_vectors(nn.MultiLabelSoftMarginLoss(weight=WEIGHTS), binary),
    "a function": on_vectors(F.mse_loss, likewise),
    "a partial function": on_vectors(
        functools.partial(F.cross_entropy, label_smoothing=0.1, ignore_index=-1), labels
    ),
    "one number per sample": Case(
        lambda: Call(lambda self, x: self.head(x)[:, 0], head=nn.Linear(5, 1)),
        targets=torch.rand,
        loss=nn.BCEWithLogitsLoss(),
        **VECTOR,
    ),
    "sharing itself": Case(Unused, loss=MainOnly(), **VECTOR),
    "over all pairs": on_vectors(contrast, labels),
    "of several outputs": Case(Unused, loss=both, **VECTOR),
}


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings(
    "ignore:the loss .(contrast|both). is not one that Fivefold can take apart"
)
@pytest.mark.parametrize(("ranks", "samples"), LAYOUTS)
@pytest.mark.parametrize("case", LOSSES)
def test_losses(case: str, ranks: int, samples: int) -> None:
    expect_exact(LOSSES[case], ranks, samples)


@pytest.mark.filterwarnings("ignore:the loss .MSELoss. is not one")
def test_a_loss_of_torch_with_a_hook_is_not_taken_apart() -> None:
    def doubled(_module: nn.Module, _inputs: object, loss: Tensor) -> Tensor:
        return 2 * loss

    x, y = torch.randn(5, 3), torch.randn(5, 2)
    net = nn.Linear(3, 2)

    def check(mesh: Mesh) -> float:
        criterion = nn.MSELoss()
        criterion.register_forward_hook(doubled)
        model = parallelize(copy.deepcopy(net), mesh, loss=criterion)
        return float(model.step(*model.shard(x, y)))

    expected = 2 * nn.functional.mse_loss(net(x), y).item()
    assert run_ranks(2, check) == pytest.approx([expected] * 2, rel=1e-5)
