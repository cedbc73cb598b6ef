"""Tiles: every image is divided among ranks, and the net computes what it would compute on whole images.

The operations that Fivefold computes in tiles, by family. Importing this registers them all with
`program.rule`.
"""

from __future__ import annotations

from fivefold.parallel.tiles import (
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
    recurrent,
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
    "recurrent",
    "reduce",
    "relative",
    "resample",
    "shuffles",
    "slices",
    "transposed",
    "views",
    "windowed",
]
