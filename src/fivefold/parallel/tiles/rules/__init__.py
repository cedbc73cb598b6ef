"""The operations that Fivefold computes in tiles, by family. Importing this registers them all."""

from __future__ import annotations

from fivefold.parallel.tiles.rules import norms, pointwise, reduce, windowed

__all__ = ["norms", "pointwise", "reduce", "windowed"]
