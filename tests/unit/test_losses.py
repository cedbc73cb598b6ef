"""Shares of any split of a batch add up to the loss of the whole, in value and gradient."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.parallel.torch_losses import split_loss

torch.manual_seed(1)
N, C = 7, 5
LOGITS = torch.randn(N, C, dtype=torch.float64)
MAPS = torch.randn(N, C, 3, 2, dtype=torch.float64)
CLASSES = torch.tensor([0, 4, -100, 2, 2, -100, 1])
PIXELS = torch.randint(0, C, (N, 3, 2)).index_put((torch.tensor([1]),), torch.tensor(-100))
WEIGHT = torch.rand(C, dtype=torch.float64)
REAL = torch.randn(N, C, dtype=torch.float64)
UNIT = torch.rand(N, C, dtype=torch.float64)
SIGNS = (UNIT > 0.5).double() * 2 - 1

CASES: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), LOGITS, CLASSES),
    "weights": (nn.CrossEntropyLoss(WEIGHT), LOGITS, CLASSES),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), LOGITS, CLASSES.clamp(min=0)),
    "smoothing": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), LOGITS, CLASSES),
    "sum": (nn.CrossEntropyLoss(WEIGHT, reduction="sum"), LOGITS, CLASSES),
    "probabilities": (nn.CrossEntropyLoss(WEIGHT), LOGITS, UNIT.softmax(1)),
    "pixels": (nn.CrossEntropyLoss(WEIGHT), MAPS, PIXELS),
    "nll": (nn.NLLLoss(WEIGHT), LOGITS.log_softmax(1), CLASSES),
    "F.cross_entropy": (F.cross_entropy, LOGITS, CLASSES),
    "partial": (functools.partial(F.cross_entropy, weight=WEIGHT), LOGITS, CLASSES),
    "partial of partial": (
        functools.partial(functools.partial(F.nll_loss, ignore_index=2), weight=WEIGHT),
        LOGITS.log_softmax(1),
        CLASSES.clamp(min=0),
    ),
    "l1": (nn.L1Loss(), LOGITS, REAL),
    "mse": (nn.MSELoss(), LOGITS, REAL),
    "F.mse_loss sum": (functools.partial(F.mse_loss, reduction="sum"), LOGITS, REAL),
    "smooth l1": (nn.SmoothL1Loss(beta=0.3), LOGITS, REAL),
    "huber": (nn.HuberLoss(), LOGITS, REAL),
    "bce": (nn.BCELoss(), UNIT, UNIT.roll(1, 0)),
    "bce logits": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT, weight=WEIGHT), LOGITS, UNIT),
    "kl batchmean": (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), UNIT.softmax(1)),
    "poisson": (nn.PoissonNLLLoss(), LOGITS, UNIT),
    "soft margin": (nn.SoftMarginLoss(), LOGITS, SIGNS),
    "multi margin": (nn.MultiMarginLoss(), LOGITS, CLASSES.clamp(min=0)),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), LOGITS, (UNIT > 0.5).double()),
    "hinge": (nn.HingeEmbeddingLoss(), LOGITS, SIGNS),
}


@pytest.mark.long(every=8)
@pytest.mark.parametrize("cut", [[7], [0, 7], [3, 4], [1, 0, 4, 2], [1] * 7], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_shares_add_up(name: str, cut: list[int]) -> None:
    loss, outputs, targets = CASES[name]
    whole = outputs.clone().requires_grad_()
    expected = loss(whole, targets)
    expected.backward()

    split = split_loss(loss)
    assert split is not None
    mine = outputs.clone().requires_grad_()
    parts = list(zip(mine.split(cut), targets.split(cut), strict=True))
    weights = [split.target_weight(t) for _, t in parts]
    total: Any = None if weights[0] is None else sum(w for w in weights if w is not None)
    shares = [split.share(o, t, total, len(o), N) for o, t in parts]
    got = sum(shares)
    assert isinstance(got, Tensor)
    got.backward()
    assert torch.allclose(got, expected, rtol=1e-13, atol=0)
    assert mine.grad is not None and whole.grad is not None
    assert torch.allclose(mine.grad, whole.grad, rtol=1e-12, atol=1e-16)


def test_the_users_loss_is_left_alone() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT)
    split_loss(loss)
    assert loss.reduction == "mean"


def test_what_cannot_be_taken_apart_is_left_whole() -> None:
    class Own(nn.MSELoss):
        pass

    assert split_loss(Own()) is None
    assert split_loss(lambda o, t: F.mse_loss(o, t).sqrt()) is None
    assert split_loss(functools.partial(F.cross_entropy, LOGITS)) is None


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="none"), functools.partial(F.mse_loss, reduction="none")]
)
def test_an_unreduced_loss_is_refused_with_the_remedy(loss: Any) -> None:
    with pytest.raises(UsageError, match="reduction='mean' or 'sum'"):
        split_loss(loss)


def test_a_loss_without_samples_in_front_is_refused() -> None:
    split = split_loss(nn.MSELoss())
    assert split is not None
    with pytest.raises(UsageError, match="leading dim"):
        split.share(torch.zeros(3, 4), torch.zeros(3, 4), None, rows=2, total=5)
