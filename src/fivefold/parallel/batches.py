"""This rank's part of a batch: on its device, its samples, its tile; and which samples these are."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fivefold import comm
from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh, Part, attach, owned, part_of
from fivefold.mesh.unread import Unread
from fivefold.parallel.alike import bits_of
from fivefold.parallel.intercept import Share
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.trees import flatten, leaves, map_tensors, rows_of
from fivefold.trace import Tag

__all__ = ["Batches", "own_samples"]

_SOME = 1 << 16
"""values by whose order batches are told apart"""


def own_samples(leaf: Tensor, mesh: Mesh) -> Tensor:
    """This rank's samples of a leaf of the whole batch, with a note of which they are."""
    mine = mesh.share(leaf.shape[0])
    part = Part(tuple(leaf.shape), (mine.start, *(0,) * (leaf.dim() - 1)))
    return attach(leaf[mine.start : mine.stop], part)


def _check_lists(tree: Any) -> None:
    rows = {leaf.shape[0] for leaf in leaves(tree) if leaf.dim()}
    if not all(leaf.dim() for leaf in leaves(tree)):
        raise UsageError(
            "the batch holds a tensor without dims, so it has no samples: make it a number if all samples "
            "share it, or a tensor with one for each"
        )
    for leaf in flatten(tree, is_leaf=_is_list)[0]:
        if _is_list(leaf) and len(leaf) in rows:
            raise UsageError(
                f"the batch holds a list of {len(leaf)} entries without tensors, as many as it has samples: "
                "make it a tensor, which is divided with the samples, or a tuple if all samples share it"
            )


def _check_whole(trees: tuple[Any, ...]) -> None:
    for leaf in leaves(trees):
        part = part_of(leaf)
        if part is not None and part.shape != tuple(leaf.shape):
            raise UsageError(
                f"model.shard was given a tensor of shape {tuple(leaf.shape)} that is this rank's part of "
                f"one of shape {part.shape} already, as fivefold.loader and model.shard give them: take it "
                "as it is"
            )


def _check_pair(trees: tuple[Any, ...]) -> None:
    if len(trees) != 2 or not all(isinstance(tree, Tensor) and tree.dim() for tree in trees):
        return
    inputs, targets = (len(tree) for tree in trees)
    if inputs != targets:
        raise UsageError(
            f"{inputs} inputs and {targets} targets: each has to have one entry for every sample, on the "
            "leading dim"
        )


def _is_list(tree: Any) -> bool:
    """Whether it is a list with entries of its own, none of them tensors."""
    return isinstance(tree, list) and bool(tree) and not leaves(tree)


def _digest(tree: Any) -> int:
    """A number for what is in tensors; 0 for zeros, and for tensors without values, or unread."""
    found = 0
    for number, leaf in enumerate(leaves(tree), 1):
        if leaf.is_meta or leaf.layout is not torch.strided or isinstance(leaf, Unread):
            continue
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        words = real.detach().reshape(-1)[:_SOME].double().nan_to_num()
        places = torch.arange(1, len(words) + 1, device=words.device)
        found += number * int(bits_of(leaf) + bits_of(words * places))
    return found % (1 << 62)


class Batches:
    """Batches of a model on a mesh; `tiles` cuts images, if there are tiles.

    `asks`: whether other replicas are there to be asked.
    """

    def __init__(self, mesh: Mesh, tiles: RecordedNet | None, *, asks: bool = True) -> None:
        self._mesh, self._tiles, self._group = mesh, tiles, mesh.group("data")
        self._joint = mesh.plan.parallel.batch_norm == "global" and self._group.size() > 1
        self._asks = asks and mesh.layout.pipe > 1
        """whether to ask the other replicas in any case: who does not know would wait for those who do"""
        self._compared = set[str]()
        """for what replicas have compared their first shares"""

    def moved(self, tree: Any) -> Any:
        """A batch on the mesh's device, its tensors still knowing which part they are."""

        def move(leaf: Tensor) -> Tensor:
            part, there = part_of(leaf), leaf.to(self._mesh.device, non_blocking=True)
            return there if part is None else attach(there, part)

        return map_tensors(move, tree)

    def shard(self, trees: tuple[Any, ...]) -> tuple[Any, ...]:
        """This rank's part of trees that every rank holds whole; the first one is cut into tiles as well.

        Raises `UsageError` for a list with an entry for every sample, which nobody would cut, for a
        tensor without dims, for inputs and targets of which one has more samples, and for what is a part
        already.
        """
        for tree in trees if self._group.size() > 1 else ():
            _check_lists(tree)
        _check_whole(trees)
        _check_pair(trees)
        return tuple(
            map_tensors(self._tile if self._tiles and not number else self._cut, tree)
            for number, tree in enumerate(trees)
        )

    def _cut(self, leaf: Tensor) -> Tensor:
        return self.moved(own_samples(leaf, self._mesh))

    def _tile(self, leaf: Tensor) -> Tensor:
        assert self._tiles is not None
        return self.moved(self._tiles.part(leaf, self._mesh.share(leaf.shape[0])))

    def share(
        self, inputs: Any, seed: int, step: int, *, draws: bool = True, told_as: str = ""
    ) -> Share:
        """Which samples of the whole batch `inputs` are. Collective where they do not say so.

        `draws`: whether random numbers are drawn as one process draws them. `told_as`: what they were given
        to, if those of replicas should differ, which is looked at once.

        Raises `UsageError` for a batch that is empty on all ranks.
        """
        rows = rows_of(inputs, "inputs")
        part, replicas = part_of(leaves(inputs)[0]), self._group.size()
        counts: list[int] = []
        if part is None or self._asks:
            counts = self._mesh.agreement.rows(rows, self._group, known=part is not None)
        if part is not None:
            total = part.shape[0]
            bounds = (*(owned(total, replicas, r).start for r in range(replicas)), total)
        else:
            if told_as and replicas > 1 and told_as not in self._compared:
                self._compare(inputs, told_as)
            bounds = tuple(itertools.accumulate(counts, initial=0))
        origin, total = bounds[self._group.rank()], bounds[-1]
        if total == 0:
            raise UsageError("the batch is empty on every rank: a step needs at least one sample")
        if (
            part is not None
            and (part.origin[0], part.origin[0] + rows)
            != bounds[self._group.rank() : self._group.rank() + 2]
        ):
            raise UsageError(
                f"an input has samples {part.origin[0]} to {part.origin[0] + rows - 1} of {total}, but "
                f"this rank's are {bounds[self._group.rank()]} to {bounds[self._group.rank() + 1] - 1}: "
                "take batches as fivefold.loader or model.shard(x, y) give them"
            )
        joint = self._group if self._joint else None
        return Share(rows, origin, total, seed, step, joint, draws, bounds=bounds)

    def is_shared(self, inputs: Any) -> bool:
        """Whether these are this rank's samples of a batch of all replicas, which then judge the same."""
        first = leaves(inputs)[0]
        part = part_of(first)
        if part is None:
            return False
        mine = self._mesh.share(part.shape[0])
        return (part.origin[0], len(first)) == (mine.start, len(mine))

    def share_alone(self, inputs: Any, seed: int, step: int) -> Share:
        """Which samples a rank would have of a batch like its own, if all ranks had as many."""
        rows, replicas = max(rows_of(inputs, "inputs"), 1), self._group.size()
        bounds = tuple(rows * replica for replica in range(replicas + 1))
        origin = bounds[self._group.rank()]
        return Share(rows, origin, bounds[-1], seed, step, None, draws=False, bounds=bounds)

    def _compare(self, inputs: Any, told_as: str) -> None:
        """Warn if the shares of all replicas are the same samples. Collective."""
        self._compared.add(told_as)
        own = torch.tensor([_digest(inputs)], device=self._mesh.device)
        every = comm.all_gather(own, self._group, Tag.CONTROL).flatten().tolist()
        if every[0] and len(set(every)) == 1:
            warn(
                f"all {self._group.size()} replicas gave {told_as} the same samples, and each counts as a "
                "part of the batch: of a batch that every rank holds whole, give it "
                "*model.shard(x, y); instead of a DataLoader, take fivefold.loader"
            )
