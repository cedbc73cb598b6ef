"""Data: the deterministic loader, and the data sets that recipes read from disk."""

from __future__ import annotations

from fivefold.data.source import BatchId, LoadError
from fivefold.data.stream import Cursor, Loader, loader

__all__ = ["BatchId", "Cursor", "LoadError", "Loader", "loader"]
