"""Measurements that a user can repeat: so far, of collectives and messages."""

from __future__ import annotations

from fivefold.bench.contender import CONTENDERS, Contender, begun
from fivefold.bench.measure import Measurement, MeasureTask, Sweep, measure
from fivefold.bench.work import MESSAGES, OPERATIONS

__all__ = [
    "CONTENDERS",
    "MESSAGES",
    "OPERATIONS",
    "Contender",
    "MeasureTask",
    "Measurement",
    "Sweep",
    "begun",
    "measure",
]
