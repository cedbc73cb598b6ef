"""The operations that Fivefold computes in tiles, by family. Importing this registers them all."""

from __future__ import annotations

from fivefold.parallel.tiles.rules import groupnorms, norms, pointwise, reduce, windowed

__all__ = ["groupnorms", "norms", "pointwise", "reduce", "windowed"]
