"""The sums of test batches, by this process alone or by the whole mesh.

Sums, not averages, add up: over ranks, over batches, over helpers. A batch that one process evaluates whole
gives the same bits wherever that is, on the same kind of processor with the same number of threads; a batch
that ranks share is rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold import comm
from fivefold.data import BatchId, Loader
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.offload.slices import Sums
from fivefold.parallel import ParallelModel
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.parallel.modes import evaluating, sums_of
from fivefold.parallel.trees import call_with
from fivefold.plan import AXES
from fivefold.trace import Phase, Tag, recording, span

__all__ = ["Evaluator", "Score"]

Score = Callable[[Any, Any], Tensor]
"""(outputs, targets) to the sums of a batch: 1-D, float64, as many for every batch"""


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
        mesh, rows = self.model.mesh, list[Tensor]()
        with span(Phase.VALIDATE), recording():
            for inputs, targets in _pairs(batches):
                with arithmetic.autocast():
                    sums = self.model.evaluate(
                        arithmetic.inputs(inputs), targets, self._score, join=False
                    )
                rows.append(sums)
                if between is not None:
                    between()
            return _joined(rows, mesh).cpu().numpy()

    def _sums(self, outputs: Any, targets: Any) -> Tensor:
        return sums_of(self._score(outputs, targets)).detach()

    @contextmanager
    def _evaluating(self) -> Generator[None]:
        """Without gradients, every module in eval mode; the inner recorder keeps this out of training's
        times.
        """
        with torch.no_grad(), span(Phase.VALIDATE), recording(), evaluating(self.model):
            yield


def _pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise UsageError(
                "a batch of the test data is no pair (inputs, targets): let the data set return pairs"
            )
        yield batch[0], batch[1]


def _joined(rows: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """The sums (batches, sums) of all ranks, of which some have scored nothing."""
    width = torch.tensor([max((len(row) for row in rows), default=0)], device=mesh.device)
    every = mesh.group(*AXES)
    width = int(comm.all_gather(width, every, Tag.CONTROL).max())
    found = torch.zeros(len(rows), width, dtype=torch.float64, device=mesh.device)
    for number, row in enumerate(rows):
        found[number, : len(row)] += row
    return comm.all_reduce(found, every, Tag.LOSS)
