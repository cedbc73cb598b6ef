"""The operations that Fivefold computes in tiles, by family. Importing this registers them all."""

from __future__ import annotations

from fivefold.parallel.tiles.rules import (
    axes,
    borders,
    groupnorms,
    joins,
    norms,
    pointwise,
    products,
    random,
    reduce,
    resample,
    slices,
    transposed,
    views,
    windowed,
)

__all__ = [
    "axes",
    "borders",
    "groupnorms",
    "joins",
    "norms",
    "pointwise",
    "products",
    "random",
    "reduce",
    "resample",
    "slices",
    "transposed",
    "views",
    "windowed",
]
