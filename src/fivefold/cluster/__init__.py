"""What exists: this node (`fivefold.cluster.node`), the cores that it grants, and clusters as data
(`fivefold.cluster.description`).
"""

from __future__ import annotations

from fivefold.cluster.cores import granted_cores

__all__ = ["granted_cores"]
