"""A rank's share of the global loss: its own numerator over the denominator of all ranks.

The mean of rank means is not the mean: with class weights, ignored targets or uneven shares it has another
value and another gradient. So each rank computes

    share_r = sum over its own targets / (weight of the targets of all ranks)        loss = sum_r share_r

Torch's own losses are taken apart. A loss of the user's may offer the same by a method
`share(outputs, targets) -> (numerator, denominator)`, two scalars of this rank; any other callable is given
the gathered outputs and targets of all ranks, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.parallel.exchange import gather_rows, row_counts
from fivefold.parallel.torch_losses import split_loss
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.trace import Tag

__all__ = ["Ahead", "SharedLoss"]


class Ahead:
    """The denominator of a loss that shares itself, for a batch in micro-batches.

    It is needed before the first backward, when there are outputs of one micro-batch only: so it is taken
    from the targets of all `rows` samples of this rank, and outputs of zeros.
    """

    def __init__(self, loss: Callable[..., Any], targets: Any, rows: int) -> None:
        self._share = getattr(loss, "share")  # noqa: B009 - of a loss of the user's
        self._targets, self._rows = targets, rows
        self.own: Tensor | None = None
        """of all samples of this rank, foreseen"""
        self.seen: Tensor | float = 0.0
        """of its micro-batches so far"""
        self._whole = torch.zeros(())

    def whole(
        self,
        outputs: Any,
        rows: int,
        denominator: Any,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Tensor:
        """The sum over all samples of all ranks; `denominator` is that of `rows` samples with `outputs`."""
        if self.own is None:

            def blank(leaf: Tensor) -> Tensor:
                by_sample = leaf.dim() and leaf.shape[0] == rows
                return leaf.new_zeros((self._rows, *leaf.shape[1:]) if by_sample else leaf.shape)

            with torch.no_grad():
                own = self._share(map_tensors(blank, outputs), self._targets)[1]
            self.own = torch.as_tensor(own, device=device).detach().double()
            self._whole = self.own.clone()
            comm.all_reduce(self._whole, group, Tag.LOSS)
        self.seen += torch.as_tensor(denominator, device=device).detach().double()
        return self._whole

    @staticmethod
    def problem(
        ahead: Ahead | None, ends: dist.ProcessGroup, device: torch.device
    ) -> UsageError | None:
        """What is wrong if micro-batches did not have the denominators that were foreseen.

        Collective among the ranks of `ends`, of which some or one have computed the loss.
        """
        seen = torch.zeros((), dtype=torch.float64, device=device)
        if ahead is not None and ahead.own is not None:
            seen += ahead.seen
        comm.all_reduce(seen, ends, Tag.LOSS)
        if ahead is None or ahead.own is None or torch.allclose(seen, ahead.own, rtol=1e-9):
            return None
        return UsageError(
            f"the denominators that the loss's share gave for micro-batches sum up to {seen.item():g}, "
            f"not to the {ahead.own.item():g} of their targets at once: it must depend on targets alone, and "
            'add up over samples; or set pipeline.schedule = "layer", which takes the batch at once'
        )


class SharedLoss:
    """A loss over the samples of all ranks of `group`, of which each rank computes its share."""

    def __init__(
        self, loss: Callable[..., Any], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.loss = loss
        """what the user gave"""
        self.split = split_loss(loss)
        """a loss of torch's, taken apart; None if it is another callable"""
        self._group = group
        self._device = device
        self._warned = False

    @property
    def shares(self) -> bool:
        """Whether the loss says itself how it is divided."""
        return getattr(self.loss, "share", None) is not None

    def begin(self, targets: Any, group: dist.ProcessGroup | None = None) -> comm.Pending | None:
        """Start to sum the weight of the targets over the ranks, if the denominator needs it.

        To be called before the forward pass, behind which the exchange then hides. `group` holds the ranks
        whose targets differ, by default those of all replicas.
        """
        weight = self.split.target_weight(targets) if self.split is not None else None
        return (
            None
            if weight is None
            else comm.start_all_reduce(weight, self._group if group is None else group, Tag.LOSS)
        )

    def ahead(self, targets: Any, rows: int) -> Ahead | None:
        """The denominator of micro-batches of these targets, of `rows` samples, if the loss shares itself."""
        return Ahead(self.loss, targets, rows) if self.split is None and self.shares else None

    def share(
        self,
        outputs: Any,
        targets: Any,
        weight: comm.Pending | Ahead | None,
        rows: int,
        total: int,
        *,
        per_sample: int | None = None,
    ) -> Tensor:
        """This rank's share, differentiable; the shares of all ranks add up to the loss.

        `weight` is what `begin` or `ahead` returned; `rows` of the `total` samples are here, with
        `per_sample` terms each if not all of them are.
        """
        if self.split is not None:
            assert not isinstance(weight, Ahead)
            summed = None if weight is None else weight.wait()
            return self.split.share(outputs, targets, summed, rows, total, per_sample=per_sample)
        custom = getattr(self.loss, "share", None)
        if custom is not None:
            numerator, denominator = custom(outputs, targets)
            if isinstance(weight, Ahead):
                found = weight.whole(outputs, rows, denominator, self._group, self._device)
                return numerator / found.to(numerator.dtype)
            whole = torch.as_tensor(denominator, device=self._device).detach().double()
            comm.all_reduce(whole, self._group, Tag.LOSS)
            return numerator / whole.to(numerator.dtype)
        if self._group.size() == 1:
            return self.loss(outputs, targets)
        return self._gathered(outputs, targets, rows)

    def _gathered(self, outputs: Any, targets: Any, rows: int) -> Tensor:
        self.warn()
        counts = row_counts(rows, self._group, self._device)

        def gather(leaf: Tensor) -> Tensor:
            if not leaf.dim() or leaf.shape[0] != rows:
                raise UsageError(
                    f"an output or target of shape {tuple(leaf.shape)} cannot be gathered for the loss: "
                    f"its leading dim should be the {rows} samples of this rank"
                )
            return gather_rows(leaf, counts, self._group, Tag.LOSS)

        # Computed alike on every rank, so each contributes its part of one loss.
        return self.alike(map_tensors(gather, outputs), map_tensors(gather, targets)) / len(counts)

    def alike(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of outputs and targets that all ranks have.

        Raises `UsageError` if it depends on anything else that the forward has made: of that, a rank has a part.
        """
        since = _graph_time()
        found = self.loss(outputs, targets)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UsageError(
                f"the loss gave {type(found).__name__} instead of a tensor of one number"
            )
        known = {leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None}
        if _reaches(found, known, since):
            raise UsageError(
                "the loss depends on a tensor that the net has made and not returned, an attribute say, of which "
                "every rank has its part only: return it from the net's forward"
            )
        return found

    def warn(self) -> None:
        """Tell once that outputs are gathered for the loss."""
        if self._warned:
            return
        self._warned = True
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        warnings.warn(
            f"the loss {name} is not one that Fivefold can take apart, so outputs and targets of all ranks "
            "are gathered for it: exact, at the cost of that traffic in every step. Give it a method "
            "share(outputs, targets) -> (numerator, denominator) to avoid it.",
            stacklevel=5,
        )


def _graph_time() -> int:
    """The number that autograd gives to what this thread computes now; it only grows."""
    probe = torch.zeros((), requires_grad=True) * 1
    assert probe.grad_fn is not None
    return _number(probe.grad_fn)


def _number(function: Any) -> int:
    return function._sequence_nr()  # noqa: SLF001


def _reaches(loss: Tensor, known: set[Any], since: int) -> bool:
    """Whether a graph leads to something made before `since`, other than `known` and leaves."""
    seen, todo = set[Any](known), [loss.grad_fn]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        following = [inner for inner, _ in function.next_functions]
        leaf = type(function).__name__ == "AccumulateGrad"
        if not leaf and _number(function) < since:
            return True
        todo.extend(following)
    return False
