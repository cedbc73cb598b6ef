from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fivefold.train.summary import EpochReport, Summary
from fivefold.train.task import CLASSES, PICTURES, Task


def measured(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Loss and metric of all, from the sums of two uneven parts."""
    first, second = (task.sums(outputs[part], targets[part]) for part in (slice(2), slice(2, None)))
    loss, scored, count = (first + second).tolist()
    return loss / count, task.score(scored / count)


@pytest.mark.parametrize("size", [(), (3, 5)])
def test_classes_are_counted_for_images_and_for_pixels(size: tuple[int, ...]) -> None:
    logits, labels = torch.randn(7, 4, *size), torch.randint(4, (7, *size))
    loss, accuracy = measured(CLASSES, logits, labels)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_pictures_are_scored_by_all_pixels_together() -> None:
    outputs, targets = torch.rand(7, 3, 6, 5), torch.rand(7, 3, 6, 5)
    loss, psnr = measured(PICTURES, outputs, targets)
    assert loss == pytest.approx(F.l1_loss(outputs, targets).item(), rel=1e-5)
    assert psnr == pytest.approx(10 * math.log10(1 / F.mse_loss(outputs, targets).item()), rel=1e-5)
    assert measured(PICTURES, targets, targets) == (0, math.inf)


def test_a_report_tells_the_metric_of_its_task_alone() -> None:
    report = EpochReport(
        epoch=1, step=2, images=3, learning_rate=0.1, loss=0.2, test_loss=0.3, accuracy=None,
        images_per_s=4.0, epoch_s=5.0, phases_s={"forward": 1.0}, psnr_db=33.517,
    )  # fmt: skip
    assert "accuracy" not in report.figures()
    assert report.figures()["psnr_db"] == 33.517
    assert Summary.of([report]).lines()[0] == "test PSNR      33.52 dB after 1 epoch"
