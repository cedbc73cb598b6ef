"""Proof that a layout computes what the unmodified model computes in one process.

check      the steps, on every rank            reference  asks one plain process, one_process
layout     the same step under the layout      measure    what an error is relative to
judge      rank 0: errors against tolerances   report     the outcome as data, read without torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.train.verify.check import verify
    from fivefold.train.verify.reference import Named
    from fivefold.train.verify.report import Report

__all__ = ["Named", "Report", "verify"]

_HOME = {"Named": "reference", "Report": "report", "verify": "check"}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fivefold.train.verify' has no attribute {name!r}")
    value: object = getattr(import_module(f"fivefold.train.verify.{_HOME[name]}"), name)
    globals()[name] = value
    return value
