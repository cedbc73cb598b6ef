"""Connections between processes of a job, before either side knows who the other is."""

from fivefold.wire.callers import Callers
from fivefold.wire.receiving import received

__all__ = ["Callers", "received"]
