"""Training: a loop of phases that is small enough to read, its progress display and its run directory.

Names are imported on first use: reports and summaries are read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.train.logger import Logger, LogWriter
    from fivefold.train.loop import fit
    from fivefold.train.precision import Arithmetic, settle_precision
    from fivefold.train.run import RunDirectory
    from fivefold.train.schedule import warmup_cosine
    from fivefold.train.summary import EpochReport, Summary
    from fivefold.train.validation import validate

__all__ = [
    "Arithmetic",
    "EpochReport",
    "LogWriter",
    "Logger",
    "RunDirectory",
    "Summary",
    "fit",
    "settle_precision",
    "validate",
    "warmup_cosine",
]

_HOME = {
    "Arithmetic": "precision",
    "EpochReport": "summary",
    "LogWriter": "logger",
    "Logger": "logger",
    "RunDirectory": "run",
    "Summary": "summary",
    "fit": "loop",
    "settle_precision": "precision",
    "validate": "validation",
    "warmup_cosine": "schedule",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fivefold.train' has no attribute {name!r}")
    value: object = getattr(import_module(f"fivefold.train.{_HOME[name]}"), name)
    globals()[name] = value
    return value
