"""The sums of test batches, by this process alone or by the whole mesh.

Sums, not averages, add up: over ranks, over batches, over helpers. A batch that one process evaluates whole
gives the same bits wherever that is, on the same kind of processor with the same number of threads; a batch
that ranks share is rounded otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.data import BatchId, Loader
from fivefold.errors import UsageError
from fivefold.mesh import part_of
from fivefold.offload.slices import Sums
from fivefold.parallel import ParallelModel
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.parallel.trees import call_with
from fivefold.trace import Phase, Tag, recording, span

__all__ = ["Evaluator", "Score"]

Score = Callable[[Any, Any], Tensor]
"""(outputs, targets) to the sums of a batch: 1-D, float64, as many for every batch"""

_AXES = ("data", "depth", "height", "width")


class Evaluator:
    """Batches of `tests`, which are pairs (inputs, targets), through `model`, to sums by `score`."""

    def __init__(self, model: ParallelModel, tests: Loader, score: Score) -> None:
        self.model, self.tests, self._score = model, tests, score

    def read(self, epoch: int, batches: Iterable[int], *, whole: bool) -> Iterator[Any]:
        """Some test batches: whole, or this rank's part of them."""
        return self.tests.read([BatchId(epoch, number) for number in batches], whole=whole)

    def alone(self, batches: Iterable[Any], arithmetic: Arithmetic) -> Sums:
        """Sums (batches, sums) of whole batches, by this process: the model must not be divided."""
        rows: list[Tensor] = []
        with self._evaluating():
            for inputs, targets in _pairs(batches):
                with arithmetic.autocast():
                    outputs = call_with(self.model, arithmetic.inputs(inputs))
                rows.append(self._sums(outputs, targets))
        return torch.stack(rows).cpu().numpy()

    def together(
        self,
        batches: Iterable[Any],
        arithmetic: Arithmetic,
        between: Callable[[], None] | None = None,
    ) -> Sums:
        """Sums (batches, sums) of batches that all ranks share. Collective.

        `between` is called after every batch.
        """
        mesh, rows, wanted = self.model.mesh, list[Tensor](), list[int]()
        with self._evaluating():
            for inputs, targets in _pairs(batches):
                with arithmetic.autocast():
                    outputs = call_with(self.model, arithmetic.inputs(inputs))
                sums, counted = self._share(outputs, targets)
                rows.append(sums)
                wanted.append(counted)
                if between is not None:
                    between()
            every = torch.stack(rows)
            comm.all_reduce(every, mesh.group(*_AXES), Tag.LOSS)
        found = every.cpu()
        if mesh.layout.tiles > 1:  # see `_share`
            scale = torch.tensor(wanted, dtype=torch.float64) / found[:, -1]
            found = found[:, :-1] * scale[:, None]
        return found.numpy()

    def _share(self, outputs: Any, targets: Any) -> tuple[Tensor, int]:
        """This rank's sums. In tiles, how many outputs they are of comes last, and how many there are.

        Outputs that are not cut, such as logits of classes, are alike on all tiles and count as often as
        there are tiles, which may differ between batches: so the number of outputs tells.
        """
        if self.model.mesh.layout.tiles == 1:
            return self._sums(outputs, targets), 0
        part = part_of(targets) if isinstance(targets, Tensor) else None
        if not isinstance(outputs, Tensor) or part is None:
            raise UsageError(
                "in tiles, outputs and targets have to be one tensor each for a validation: let the net "
                "return a tensor, or validate with a data axis only"
            )
        seen = _seen(self.model.whole(targets), outputs, part.origin[0])
        sums, placed = self._sums(outputs, seen), part_of(outputs)
        rest = outputs.shape[1:] if placed is None else placed.shape[1:]
        counted = sums.new_tensor([outputs.numel()])
        return torch.cat([sums, counted]), part.shape[0] * math.prod(rest)

    def _sums(self, outputs: Any, targets: Any) -> Tensor:
        sums = self._score(outputs, targets)
        if not isinstance(sums, Tensor) or sums.dim() != 1 or sums.dtype != torch.float64:  # pyright: ignore[reportUnnecessaryIsInstance]
            found = f"{sums.dtype} {tuple(sums.shape)}" if isinstance(sums, Tensor) else repr(sums)  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"score returned {found}: it has to return the sums of a batch, a tensor of one dim, float64"
            )
        return sums.detach()

    @contextmanager
    def _evaluating(self) -> Generator[None]:
        """Without gradients, every module in eval mode; the inner recorder keeps this out of training's
        times.
        """
        training = [module for module in self.model.modules() if module.training]
        try:
            with torch.no_grad(), span(Phase.VALIDATE), recording():
                self.model.eval()
                yield
        finally:
            _train(training)


def _pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise UsageError(
                "a batch of the test data is no pair (inputs, targets): let the data set return pairs"
            )
        yield batch[0], batch[1]


def _train(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.training = True


def _seen(targets: Tensor, outputs: Tensor, first: int) -> Tensor:
    """The samples, from number `first` on, and pixels of `targets` that `outputs` are for.

    Dims are counted from the last.
    """
    part = part_of(outputs)
    if part is None:
        return targets
    if len(targets) > len(outputs):
        targets = targets.narrow(0, part.origin[0] - first, len(outputs))
    for dim in range(-1, 1 - outputs.dim(), -1):
        if targets.shape[dim] == part.shape[dim]:
            targets = targets.narrow(dim, part.origin[dim], outputs.shape[dim])
    return targets
