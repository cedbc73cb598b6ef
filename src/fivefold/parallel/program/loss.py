"""A tile's share of the global loss.

Where the loss is a sum over pixels, every tile sums its own: the target is laid as the output lies. What is
not cut, or a loss that cannot be taken apart, is computed alike on several ranks and divided by their number,
so that it counts once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fivefold import comm
from fivefold.errors import UsageError, warn
from fivefold.mesh import Part, attach, part_of
from fivefold.parallel.intercept import Share
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.program.exchange import Exchange, exchange
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import GridSamples, Outputs
from fivefold.parallel.program.rule import everything, want_of
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.torch_losses import Loss
from fivefold.parallel.trees import flatten, in_graph, unflatten
from fivefold.torch_private import base_of
from fivefold.trace import Tag

__all__ = ["TileLoss", "whole_images", "whole_outputs"]


class TileLoss:
    """A `SharedLoss` whose outputs lie in parts."""

    def __init__(self, loss: SharedLoss, tiles: RecordedNet) -> None:
        self._loss, self._tiles = loss, tiles
        self._warned = False

    def in_tiles(self, targets: Any) -> bool:
        """Whether the targets are tiles of theirs, so that their weight has to be summed over tiles too."""
        return any(_is_tile(leaf) for leaf in flatten(targets)[0] if isinstance(leaf, Tensor))

    def share(self, outputs: Outputs, targets: Any, weight: Any, share: Share) -> Tensor:
        """This rank's share; the shares of all ranks add up to the loss."""
        split, grid = self._loss.split, self._tiles.grid
        if split is not None and isinstance(outputs.parts, Tensor) and isinstance(targets, Tensor):
            matched = _matching(split, outputs.spreads, targets, outputs.samples)
            if matched is not None:
                return self._by_pixels(outputs, targets, weight, share, matched=matched)
        everyone = split is None and not self._loss.shares and grid.data is not None
        parts = self._gathered(outputs, everyone=everyone)
        targets = whole_images(self._tiles, targets, outputs.samples if everyone else None)
        if everyone:  # computed alike on every rank
            return self._loss.alike(parts, targets) / grid.size
        if self._loss.shares:
            own = self._loss.over_all(*self._loss.own_terms(parts, targets, recorded=True))
        else:
            own = self._loss.share(parts, targets, weight, outputs.samples.own, share.total)
        if not own.requires_grad:
            own = in_graph(own, parts)
        return own / grid.tiles

    def of_micro_batch(
        self, outputs: Outputs, targets: Any, weight: Any, share: Share
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's share of what a micro-batch adds to the loss, and None.

        Of a loss that shares itself the denominator is known when all micro-batches are done: a numerator
        over the number of samples instead, and this rank's part of the denominator.
        """
        if self._loss.split is not None or not self._loss.shares:
            return self.share(outputs, targets, weight, share), None
        parts = self._gathered(outputs, everyone=False)
        targets = whole_images(self._tiles, targets)
        numerator, denominator = self._loss.own_terms(parts, targets, recorded=True)
        tiles = self._tiles.grid.tiles
        if not numerator.requires_grad:
            numerator = in_graph(numerator, parts)
        return numerator / (tiles * share.total), denominator / tiles

    def _by_pixels(
        self,
        outputs: Outputs,
        targets: Tensor,
        weight: Any,
        share: Share,
        *,
        matched: tuple[int, ...],
    ) -> Tensor:
        spread, split = outputs.spreads, self._loss.split
        assert isinstance(spread, Spread) and split is not None
        tiles, samples = self._tiles, outputs.samples
        grid, rank, cuts = tiles.grid, tiles.here.rank, spread.cuts
        wants = tuple(
            want_of(n, cuts[dim])
            for n, dim in zip(_global(targets, samples.rows), matched, strict=True)
        )
        if samples.rows:
            leaf, lies = self._target(targets)
            plan = Exchange.of(tiles.joined(lies, samples), wants, grid, rank)
            targets = exchange(leaf.contiguous(), plan, tiles.lines)
        else:  # there are no samples: the right shape is enough
            shape = [
                sum(b - a for a, b in want.segments[grid.part(rank, want.axes)]) for want in wants
            ]
            targets = targets.new_zeros((0, *shape[1:]))
        alike = grid.size // math.prod(grid.sizes[axis] for axis in spread.axes)
        # Where only samples are divided, the loss sees all of its terms.
        per_sample = (
            math.prod(spread.shape[2 if split.weighted else 1 :]) if any(cuts[1:]) else None
        )
        start, stop = spread.owned(grid, rank)[0]
        rows = stop - start if samples.rows else 0
        own = self._loss.share(
            outputs.parts, targets, weight, rows, share.total, per_sample=per_sample
        )
        return own / alike

    def _target(self, leaf: Tensor) -> tuple[Tensor, Spread]:
        if _is_tile(leaf):
            return self._tiles.lies(leaf)
        return leaf, Spread.whole(leaf.shape)

    def _gathered(self, outputs: Outputs, *, everyone: bool) -> Any:
        """Whole outputs: of this replica's samples, or of everyone's."""
        flat, tree = flatten(outputs.parts)
        spreads = flatten(outputs.spreads, lambda leaf: isinstance(leaf, Spread))[0]
        data = self._tiles.grid.data
        lying = [s for s in spreads if isinstance(s, Spread) and len(s.shape) > 1]
        if any(axis != data for spread in lying for axis in spread.axes):
            self._warn()  # one number for each sample is no traffic
        elif everyone:
            self._loss.warn()
        whole = [
            self._whole(leaf, spread, outputs, everyone) if isinstance(spread, Spread) else leaf
            for leaf, spread in zip(flat, spreads, strict=True)
        ]
        return unflatten(whole, tree)

    def _whole(self, leaf: Tensor, spread: Spread, outputs: Outputs, everyone: bool) -> Tensor:
        grid, samples = self._tiles.grid, outputs.samples
        if not samples.rows:
            return leaf.new_zeros((0, *spread.shape[1:])) + leaf.sum() * 0
        wants = everything(spread.shape)
        if not everyone and grid.data is not None and spread.shape[:1] == (samples.rows,):
            wants = (samples.want(grid.data), *wants[1:])
        plan = Exchange.of(spread, wants, grid, self._tiles.here.rank)
        found = exchange(leaf, plan, self._tiles.lines)
        return found if base_of(found) is None else found.clone()  # a loss may change it in place

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "the loss cannot be computed in tiles: every rank gathers the whole of what the net returns. "
                "Losses of torch on one tensor are computed in tiles. The result is exact",
            )


def whole_images(tiles: RecordedNet, tree: Any, everyone: GridSamples | None = None) -> Any:
    """Tiles in `tree` put together, on all tile ranks of a replica; what is no tile stays. Collective.

    With `everyone`, what has this replica's of these samples is put together with that of all replicas.
    """
    flat, structure = flatten(tree)

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if _is_tile(leaf):
            if (
                not len(leaf) and everyone is None
            ):  # there are no samples: the right shape is enough
                return leaf.new_zeros(_global(leaf))
            leaf, spread = tiles.lies(leaf)
        else:
            spread = Spread.whole(leaf.shape)
        if everyone is not None and leaf.dim():
            spread = tiles.joined(spread, everyone)
        plan = Exchange.of(spread, everything(spread.shape), tiles.grid, tiles.here.rank)
        return leaf if plan.is_identity else exchange(leaf.contiguous(), plan, tiles.lines)

    return unflatten([gather(leaf) for leaf in flat], structure)


def whole_outputs(tiles: RecordedNet, tree: Any) -> Any:
    """As `whole_images`, for what a net returned too, whose tiles need not be those of inputs."""
    flat, structure = flatten(tree)
    known = [leaf for leaf in flat if isinstance(leaf, Tensor) and part_of(leaf) is not None]
    if tiles.grid.tiles == 1 or not known:
        return tree
    own = [number for leaf in known for number in _box(leaf)]
    told = torch.tensor(own, device=known[0].device)
    every = comm.all_gather(told, tiles.lines.within, Tag.CONTROL).tolist()

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or part_of(leaf) is None:
            return leaf
        size = 2 * (leaf.dim() - 1)
        boxes = [[one.pop(0) for _ in range(size)] for one in every]
        return _assembled(tiles, leaf, boxes)

    return unflatten([gather(leaf) for leaf in flat], structure)


def _box(leaf: Tensor) -> list[int]:
    """Where a tile is, and how large, without samples."""
    part = part_of(leaf)
    assert part is not None
    return [*part.origin[1:], *leaf.shape[1:]]


def _assembled(tiles: RecordedNet, leaf: Tensor, boxes: list[list[int]]) -> Tensor:
    """A leaf of which every tile rank has a box."""
    shape, dims = _global(leaf), leaf.dim() - 1
    if all(box[dims:] == [*shape[1:]] for box in boxes):
        return leaf
    if not len(leaf):
        return leaf.new_empty(shape)
    most = [max(box[dims + dim] for box in boxes) for dim in range(dims)]
    padded = leaf.new_zeros((len(leaf), *most))
    padded[(slice(None), *map(slice, leaf.shape[1:]))] = leaf.detach()
    made = leaf.new_empty(shape)
    for box, piece in zip(
        boxes, comm.all_gather(padded, tiles.lines.within, Tag.TILES_TO_BATCH), strict=True
    ):
        there = [slice(a, a + n) for a, n in zip(box[:dims], box[dims:], strict=True)]
        made[(slice(None), *there)] = piece[(slice(None), *map(slice, box[dims:]))]
    part = part_of(leaf)
    assert part is not None
    return attach(made, Part(part.shape, (part.origin[0], *(0,) * dims)))


def _global(leaf: Tensor, rows: int | None = None) -> tuple[int, ...]:
    """Shape of what a leaf is part of, but with this replica's samples, or with `rows`."""
    part = part_of(leaf)
    shape = tuple(leaf.shape) if part is None else (leaf.shape[0], *part.shape[1:])
    return shape if rows is None else (rows, *shape[1:])


def _is_tile(leaf: Tensor) -> bool:
    part = part_of(leaf)
    return part is not None and tuple(leaf.shape[1:]) != part.shape[1:]


def _matching(
    split: Loss, spread: Spread, targets: Tensor, samples: GridSamples
) -> tuple[int, ...] | None:
    """For every dim of the target, the dim of the output that it follows; None if it cannot be cut.

    Raises `UsageError` for targets whose pixels do not match those of the output.
    """
    shape = _global(targets, samples.rows) if targets.dim() else ()
    if not shape or spread.shape[:1] != (max(samples.rows, 1),):
        return None
    if targets.shape[0] != samples.own:
        raise UsageError(
            f"targets for {targets.shape[0]} samples were given with outputs for {samples.own}"
        )
    if not any(spread.cuts[1:]) and len(shape) <= len(spread.shape):
        return tuple(range(len(shape)))
    if split.weighted:
        if spread.cuts[1:2] != (None,):
            return None
        if len(shape) == len(spread.shape) - 1 and shape[1:] == spread.shape[2:]:
            return (0, *range(2, len(spread.shape)))
    if split.pointwise or split.weighted:
        return tuple(range(len(shape))) if shape[1:] == spread.shape[1:] else None
    return None
