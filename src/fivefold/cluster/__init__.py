"""What exists: so far the cores that were granted."""

from __future__ import annotations

from fivefold.cluster.cores import granted_cores

__all__ = ["granted_cores"]
