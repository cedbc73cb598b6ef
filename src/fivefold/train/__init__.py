"""Training: a loop of phases that is small enough to read, its progress display and its run directory."""

from __future__ import annotations

from fivefold.train.loop import fit
from fivefold.train.precision import Arithmetic, settle_precision
from fivefold.train.report import EpochReport, Summary
from fivefold.train.run import Run
from fivefold.train.schedule import warmup_cosine
from fivefold.train.validate import validate

__all__ = [
    "Arithmetic",
    "EpochReport",
    "Run",
    "Summary",
    "fit",
    "settle_precision",
    "validate",
    "warmup_cosine",
]
