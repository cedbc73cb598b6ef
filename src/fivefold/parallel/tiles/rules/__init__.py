"""The operations that Fivefold computes in tiles, by family. Importing this registers them all."""

from __future__ import annotations

from fivefold.parallel.tiles.rules import (
    adaptive,
    axes,
    borders,
    by_row,
    groupnorms,
    hooked,
    joins,
    norms,
    patches,
    pointwise,
    products,
    random,
    reduce,
    relative,
    resample,
    shuffles,
    slices,
    transposed,
    views,
    windowed,
)

__all__ = [
    "adaptive",
    "axes",
    "borders",
    "by_row",
    "groupnorms",
    "hooked",
    "joins",
    "norms",
    "patches",
    "pointwise",
    "products",
    "random",
    "reduce",
    "relative",
    "resample",
    "shuffles",
    "slices",
    "transposed",
    "views",
    "windowed",
]
