"""Measurements that a user can repeat: so far, of collectives and messages."""

from __future__ import annotations

from fivefold.bench.contender import CONTENDERS, Contender, start
from fivefold.bench.measure import Measurement, Request, Sweep, measure
from fivefold.bench.work import OPERATIONS

__all__ = [
    "CONTENDERS",
    "OPERATIONS",
    "Contender",
    "Measurement",
    "Request",
    "Sweep",
    "measure",
    "start",
]
