"""How the loader reads windows: this rank's tile of every sample, with its box.

sizes ── rule of ownership ── boxes ── window ── (sample, boxes) ── collate ── (batch, boxes) ── notes
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, as_tensor

from fivefold.data.collate import is_column, stack
from fivefold.data.seeding import Drawn, isolated
from fivefold.data.source import Collate
from fivefold.data.windows import Box, Windowed, check_transform, windows_of
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, attach, owned
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.mesh.unread import Ranges, Unread
from fivefold.plan import Plan
from fivefold.torch_private import pytree

__all__ = ["SamplesReadLater", "TileCollate", "TiledSamples", "noted", "reads_later", "tiles_of"]


def reads_later(plan: Plan) -> bool:
    """Whether windows are read as turns come to them."""
    return plan.tiles.by_turns and bool(plan.memory.budget)


def tiles_of(dataset: Any, mesh: Mesh) -> TiledSamples | None:
    """This rank's tiles of a data set's samples; None without tile axes, or if it offers no windows.

    Where the rank computes its part by turns under a budget, images are read as they come to them.

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
    later = reads_later(mesh.plan)
    if not axes and not later:
        return None
    for name in ("transform", "target_transform"):
        check_transform(getattr(windows, name, None))
    return (SamplesReadLater if later else TiledSamples)(windows, axes)


class TiledSamples:
    """Samples (sample, boxes), the images of which are cut to the tile of one rank.

    `axes` maps a tile axis to (number of tiles along it, which of them).
    """

    def __init__(self, windows: Windowed, axes: dict[str, tuple[int, int]]) -> None:
        self.windows = windows
        self.axes = axes
        self._dims = -min((TILE_DIMS[axis] for axis in axes), default=0)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        boxes = self._boxes(index)
        return self._read(index, boxes), boxes

    def _boxes(self, index: int) -> Any:
        return pytree.tree_map(self._box, self.windows.sizes(index), is_leaf=_is_size)

    def _read(self, index: int, boxes: Any) -> Any:
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
        return sample

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


class SamplesReadLater(TiledSamples):
    """The same samples, whose images are read when something is computed with them."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        drawn, boxes = Drawn.now(), self._boxes(index)
        flat, structure = pytree.tree_flatten(boxes)
        sample = self._read(index, pytree.tree_unflatten([_pixel(box) for box in flat], structure))
        leaves = [
            leaf if box is None else self._later(as_tensor(leaf), (index, number), boxes, drawn)
            for number, (leaf, box) in enumerate(zip(pytree.tree_leaves(sample), flat, strict=True))
        ]
        return pytree.tree_unflatten(leaves, structure), boxes

    def _later(self, pixel: Tensor, which: tuple[int, int], boxes: Any, drawn: Drawn) -> Unread:
        """An image of a sample, of which one pixel has been read."""
        (index, number), (flat, structure) = which, pytree.tree_flatten(boxes)
        box: Box = flat[number]
        before = pixel.dim() - len(box.size)

        def read(ranges: Ranges) -> Tensor:
            asked = [_pixel(one) for one in flat]
            asked[number] = Box(box.size, tuple(ranges[before:]))
            with isolated():
                drawn.again()  # what the data set draws is drawn as often as it is read
                sample = self._read(index, pytree.tree_unflatten(asked, structure))
            image = as_tensor(pytree.tree_leaves(sample)[number])
            return image[tuple(slice(one.start, one.stop) for one in ranges[:before])]

        ranges = [*(range(n) for n in pixel.shape[:before]), *box.ranges]
        return Unread(read, ranges, pixel.dtype)


def _pixel(box: Box | None) -> Box | None:
    """The first one of a box."""
    return None if box is None else Box(box.size, tuple(one[:1] for one in box.ranges))


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
