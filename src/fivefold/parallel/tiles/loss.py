"""A tile's share of the global loss.

Where the loss is a sum over pixels, every tile sums its own: the target is laid as the output lies. What is
not cut, or a loss that cannot be taken apart, is computed alike on several ranks and divided by their number,
so that it counts once.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fivefold.errors import UsageError
from fivefold.mesh import part_of
from fivefold.parallel.intercept import Share
from fivefold.parallel.losses import SharedLoss
from fivefold.parallel.tiles.exchange import Exchange, exchange
from fivefold.parallel.tiles.net import Outputs, TiledNet
from fivefold.parallel.tiles.rule import everything, want_of
from fivefold.parallel.tiles.spread import Spread
from fivefold.parallel.torch_losses import Loss

__all__ = ["TileLoss", "whole_images"]


class TileLoss:
    """A `SharedLoss` whose outputs lie in tiles."""

    def __init__(self, loss: SharedLoss, tiles: TiledNet) -> None:
        self._loss, self._tiles = loss, tiles
        self._weighted = loss.split is not None and loss.split.weighted
        self._warned = False

    def in_tiles(self, targets: Any) -> bool:
        """Whether the targets are tiles of theirs, so that their weight has to be summed over tiles too."""
        return any(_is_tile(leaf) for leaf in tree_flatten(targets)[0] if isinstance(leaf, Tensor))

    def share(self, outputs: Outputs, targets: Any, weight: Any, share: Share) -> Tensor:
        """This rank's share; the shares of all ranks add up to the loss."""
        split = self._loss.split
        if split is not None and isinstance(outputs.parts, Tensor) and isinstance(targets, Tensor):
            matched = _matching(split, outputs.spreads, targets)
            if matched is not None:
                return self._by_pixels(outputs, targets, weight, share, matched=matched)
        parts = self._whole(outputs, share)
        targets = whole_images(self._tiles, targets)
        own = self._loss.share(parts, targets, weight, share.rows, share.total)
        return own / self._tiles.grid.size

    def _by_pixels(
        self,
        outputs: Outputs,
        targets: Tensor,
        weight: Any,
        share: Share,
        *,
        matched: tuple[int, ...],
    ) -> Tensor:
        spread: Spread = outputs.spreads
        grid, rank = self._tiles.grid, self._tiles.here.rank
        cuts = spread.cuts
        wants = tuple(
            want_of(n, cuts[dim]) for n, dim in zip(_global(targets), matched, strict=True)
        )
        if share.rows:
            leaf, lies = self._target(targets)
            plan = Exchange.of(lies, wants, grid, rank)
            targets = exchange(leaf.contiguous(), plan, self._tiles.group)
        else:  # none of the samples are here: the right shape is enough
            shape = [
                sum(b - a for a, b in want.segments[grid.part(rank, want.axes)]) for want in wants
            ]
            targets = targets.new_zeros((0, *shape[1:]))
        alike = grid.size // math.prod(grid.sizes[axis] for axis in spread.axes)
        # Where only samples are divided, the loss sees all of its terms.
        per_sample = (
            math.prod(spread.shape[2 if self._weighted else 1 :]) if any(cuts[1:]) else None
        )
        start, stop = spread.owned(grid, rank)[0]
        rows = stop - start if share.rows else 0  # tiles may have been turned into samples
        own = self._loss.share(
            outputs.parts, targets, weight, rows, share.total, per_sample=per_sample
        )
        return own / alike

    def _target(self, leaf: Tensor) -> tuple[Tensor, Spread]:
        if _is_tile(leaf):
            return self._tiles.lies(leaf)
        return leaf, Spread.whole(leaf.shape)

    def _whole(self, outputs: Outputs, share: Share) -> Any:
        flat, tree = tree_flatten(outputs.parts)
        spreads = tree_flatten(outputs.spreads, is_leaf=lambda leaf: isinstance(leaf, Spread))[0]
        if any(isinstance(s, Spread) and not s.is_whole for s in spreads):
            self._warn()
        whole = [
            self._gathered(leaf, spread, share) if isinstance(spread, Spread) else leaf
            for leaf, spread in zip(flat, spreads, strict=True)
        ]
        return tree_unflatten(whole, tree)

    def _gathered(self, leaf: Tensor, spread: Spread, share: Share) -> Tensor:
        if not share.rows:
            return leaf.new_zeros((0, *spread.shape[1:])) + leaf.sum() * 0
        plan = Exchange.of(
            spread, everything(spread.shape), self._tiles.grid, self._tiles.here.rank
        )
        return exchange(leaf, plan, self._tiles.group)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the loss cannot be computed in tiles: every rank gathers the whole of what the net returns. "
                "Losses of torch on one tensor are computed in tiles. The result is exact",
                stacklevel=2,
            )


def whole_images(tiles: TiledNet, tree: Any) -> Any:
    """Tiles in `tree` put together, on all tile ranks of a replica; what is no tile stays. Collective."""
    flat, structure = tree_flatten(tree)

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not _is_tile(leaf):
            return leaf
        if not len(leaf):  # none of the samples are here: the right shape is enough
            return leaf.new_zeros(_global(leaf))
        tile, spread = tiles.lies(leaf)
        plan = Exchange.of(spread, everything(spread.shape), tiles.grid, tiles.here.rank)
        return exchange(tile.contiguous(), plan, tiles.group)

    return tree_unflatten([gather(leaf) for leaf in flat], structure)


def _global(leaf: Tensor) -> tuple[int, ...]:
    """Shape of what a leaf is part of, but with this replica's samples."""
    part = part_of(leaf)
    return tuple(leaf.shape) if part is None else (leaf.shape[0], *part.shape[1:])


def _is_tile(leaf: Tensor) -> bool:
    part = part_of(leaf)
    return part is not None and tuple(leaf.shape[1:]) != part.shape[1:]


def _matching(split: Loss, spread: Spread, targets: Tensor) -> tuple[int, ...] | None:
    """For every dim of the target, the dim of the output that it follows; None if it cannot be cut.

    Raises `UsageError` for targets whose pixels do not match those of the output.
    """
    shape = _global(targets)
    if shape[0] != spread.shape[0] and targets.shape[0]:
        raise UsageError(
            f"targets for {shape[0]} samples were given with outputs for {spread.shape[0]}"
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
