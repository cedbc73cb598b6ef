"""How the loader reads windows: this rank's tile of every sample, with its box.

sizes ── rule of ownership ── boxes ── window ── (sample, boxes) ── collate ── (batch, boxes) ── notes
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fivefold.data.collate import is_column, stack
from fivefold.data.source import Collate
from fivefold.data.windows import Box, Windowed, check_transform, windows_of
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, attach, owned
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.torch_private import pytree

__all__ = ["TileCollate", "TiledSamples", "noted", "tiles_of"]


def tiles_of(dataset: Any, mesh: Mesh) -> TiledSamples | None:
    """This rank's tiles of a data set's samples; None without tile axes, or if it offers no windows.

    Raises `UsageError` for a transform that does not work on windows.
    """
    windows = windows_of(dataset)
    if windows is None:
        return None
    axes = {
        axis: (int(getattr(mesh.layout, axis)), mesh.coordinate(axis))
        for axis in TILE_DIMS
        if getattr(mesh.layout, axis) > 1
    }
    if not axes:
        return None
    for name in ("transform", "target_transform"):
        check_transform(getattr(windows, name, None))
    return TiledSamples(windows, axes)


class TiledSamples:
    """Samples (sample, boxes), the images of which are cut to the tile of one rank.

    `axes` maps a tile axis to (number of tiles along it, which of them).
    """

    def __init__(self, windows: Windowed, axes: dict[str, tuple[int, int]]) -> None:
        self.windows = windows
        self.axes = axes
        self._dims = -min(TILE_DIMS[axis] for axis in axes)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        boxes = pytree.tree_map(self._box, self.windows.sizes(index), is_leaf=_is_size)
        sample = self.windows.window(index, boxes)
        leaves, structure = pytree.tree_flatten(sample)
        asked, expected = pytree.tree_flatten(boxes)
        if structure != expected:
            raise UsageError(
                f"window({index}) and sizes({index}) of {type(self.windows).__name__} differ in structure: "
                "return the sample's structure from both, with None in sizes for what is no image"
            )
        for leaf, box in zip(leaves, asked, strict=True):
            self._check(leaf, box, index)
        return sample, boxes

    def _box(self, size: tuple[int, ...] | None) -> Box | None:
        if size is None:
            return None
        ranges = [range(n) for n in size]
        if len(size) >= self._dims:  # else it is no image in the sense of this layout, and whole
            for axis, (parts, index) in self.axes.items():
                n = size[TILE_DIMS[axis]]
                if n < parts:
                    raise UsageError(
                        f"an image of {' x '.join(map(str, size))} pixels has {n} along {axis}, too few for "
                        f"{axis}={parts}: use {axis}={max(n, 1)} or less"
                    )
                ranges[TILE_DIMS[axis]] = owned(n, parts, index)
        return Box(tuple(size), tuple(ranges))

    def _check(self, leaf: Any, box: Box | None, index: int) -> None:
        if box is None:
            return
        shape = tuple(getattr(leaf, "shape", ()))
        if shape[-len(box.shape) :] != box.shape:
            raise UsageError(
                f"window({index}) of {type(self.windows).__name__} returned an image of shape {shape} for a "
                f"box of {box.shape} pixels: return image[box.slices], and let transforms keep the size"
            )


def _is_size(node: Any) -> bool:
    return (
        isinstance(node, tuple)
        and bool(node)
        and all(isinstance(n, (int, np.integer)) for n in node)
    )


class TileCollate:
    """Pairs (sample, boxes) to (batch, boxes), by a collate of the user's or the default one."""

    def __init__(self, collate: Collate | None) -> None:
        self.collate = collate or stack

    def __call__(self, pairs: list[Any]) -> Any:
        """The batch of the samples, and the boxes that they have in common."""
        for alike in zip(*(pytree.tree_flatten(boxes)[0] for _, boxes in pairs), strict=True):
            sizes = {" x ".join(map(str, box.size)) for box in alike if box is not None}
            if len(sizes) > 1:
                raise UsageError(
                    f"images of a batch differ in size and cannot be stacked: {', '.join(sorted(sizes))} "
                    "pixels; use batch_size=1, or a data set with images of one size"
                )
        return self.collate([sample for sample, _ in pairs]), pairs[0][1]


def noted(batch: Any, boxes: Any, *, samples: int, start: int) -> Any:
    """The batch with the part of the global batch noted on every tensor.

    `boxes` is None if no images were cut.

    Raises `UsageError` if a collate has changed the structure of tiles.
    """
    leaves, structure = pytree.tree_flatten(batch, is_leaf=is_column)
    places = [None] * len(leaves) if boxes is None else pytree.tree_flatten(boxes)[0]
    if len(leaves) != len(places):
        raise UsageError(
            "collate changed the structure of the samples, so it is unknown which tensors are tiles: "
            "keep it, or use a data set without windows"
        )

    def note(leaf: Any, box: Box | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if box is None:
            part = Part((samples, *leaf.shape[1:]), (start, *[0] * (leaf.dim() - 1)))
        else:
            before = leaf.shape[1 : leaf.dim() - len(box.size)]
            origin = [r.start for r in box.ranges]
            part = Part((samples, *before, *box.size), (start, *[0] * len(before), *origin))
        return attach(leaf, part)

    noted_leaves = [note(leaf, box) for leaf, box in zip(leaves, places, strict=True)]
    return pytree.tree_unflatten(noted_leaves, structure)
