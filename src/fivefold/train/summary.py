"""What the loop tells about a run: one report per epoch, and a summary. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fivefold.trace import Phase, Recorder

__all__ = ["EpochReport", "Summary", "by_phase", "scored"]


@dataclass(frozen=True)
class EpochReport:
    """What one epoch came to: a line of metrics.jsonl, without the metrics of other tasks."""

    epoch: int
    """from 1"""
    step: int
    """optimiser steps since the run began"""
    images: int
    """images trained on, over all ranks, since this process began: 0 where it only validates the epoch"""
    learning_rate: float | None
    """for the step to come; None where others trained the epoch"""
    loss: float | None
    """mean over the samples trained on, each by the model as it was when they came; None without any"""
    test_loss: float
    accuracy: float | None
    """share of the test samples classified correctly, after the epoch; None if there are no classes"""
    images_per_s: float
    """training images per second over all ranks; validation does not count"""
    epoch_s: float
    """seconds, validation included; where helpers validate, what was waited for them"""
    phases_s: Mapping[str, float]
    """seconds of rank 0 by phase"""
    psnr_db: float | None = None
    """peak signal-to-noise ratio of the test pictures, all pixels together; None without pictures"""

    def figures(self) -> dict[str, object]:
        """The fields that have a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Summary:
    """What a finished run came to."""

    epochs: int
    images: int
    """images trained on, over all ranks and epochs"""
    accuracy: float | None
    """on the test data, after the last epoch; None if there are no classes"""
    images_per_s: float
    """median of the epochs"""
    total_s: float
    """seconds from the first batch to the last validation"""
    phases_s: Mapping[str, float]
    """seconds of rank 0 by phase"""
    psnr_db: float | None = None
    """of the test pictures, after the last epoch; None without pictures"""

    @classmethod
    def of(cls, reports: Sequence[EpochReport]) -> Summary:
        """Sum up the reports of a run, at least one."""
        phases = {name: sum(r.phases_s.get(name, 0.0) for r in reports) for name in Phase}
        return cls(
            epochs=len(reports),
            images=sum(report.images for report in reports),
            accuracy=reports[-1].accuracy,
            psnr_db=reports[-1].psnr_db,
            images_per_s=statistics.median([r.images_per_s for r in reports if r.images] or [0.0]),
            total_s=sum(report.epoch_s for report in reports),
            phases_s={name.value: seconds for name, seconds in phases.items() if seconds},
        )

    def lines(self) -> list[str]:
        """The summary in words."""
        shares = {name: seconds / self.total_s for name, seconds in self.phases_s.items()}
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        spent = "  ".join(f"{name} {share:.0%}" for name, share in shares.items())
        epochs = f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        name, value = scored(self)
        return [
            f"{name:15}{value} after {epochs}",
            f"throughput     {self.images_per_s:,.0f} images/s; {self.images:,} in {self.total_s:.1f} s",
            f"time           {spent}",
        ]


def scored(of: EpochReport | Summary) -> tuple[str, str]:
    """Name and value of the metric: ("test accuracy", "0.975")."""
    if of.psnr_db is not None:
        return "test PSNR", f"{of.psnr_db:.2f} dB"
    return "test accuracy", f"{of.accuracy:.3f}"


def by_phase(recorder: Recorder) -> dict[str, float]:
    """Seconds recorded so far under each phase that occurred."""
    return {p.value: recorder.total_s(p) for p in Phase if recorder.total_s(p)}
