"""A rank's share of the global loss: its own numerator over the denominator of all ranks.

The mean of rank means is not the mean: with class weights, ignored targets or uneven shares it has another
value and another gradient. So each rank computes

    share_r = sum over its own targets / (weight of the targets of all ranks)        loss = sum_r share_r

Torch's own losses are taken apart. A loss of the user's may offer the same by a method
`share(outputs, targets) -> (numerator, denominator)`, two scalars of this rank; any other callable is given
the gathered outputs and targets of all ranks, with a warning, and has to give the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.exchange import gather_rows, row_counts
from fivefold.parallel.torch_losses import Loss, split_loss
from fivefold.parallel.trained import functions, trained_by
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.torch_private import is_dtensor, sequence_number
from fivefold.trace import Tag

__all__ = ["SharedLoss"]

_APART = 1024
"""how many times the rounding of one number two ranks may differ that compute the same"""


class SharedLoss:
    """A loss over the samples of all ranks, of which each rank computes its share."""

    def __init__(self, loss: Callable[..., Any], mesh: Mesh, net: nn.Module) -> None:
        self.loss = loss
        """what the user gave"""
        self.split: Loss | None = split_loss(loss)
        """a loss of torch's, taken apart; None if it is another callable"""
        self._net = net
        self._group, self._device = mesh.group("data"), mesh.device
        self._tiles, self._everyone = mesh.group(*TILE_DIMS), mesh.group("data", *TILE_DIMS)
        self._alone, self._predicts = mesh.size == 1, mesh.predicts
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
        self.split = split_loss(self.loss)  # its options may have changed
        weight = self.split.target_weight(targets) if self.split is not None else None
        return (
            None
            if weight is None
            else comm.start_all_reduce(weight, self._group if group is None else group, Tag.LOSS)
        )

    def share(
        self,
        outputs: Any,
        targets: Any,
        weight: comm.Pending | None,
        rows: int,
        total: int,
        *,
        per_sample: int | None = None,
        lie: Sequence[tuple[int, int] | None] | None = None,
    ) -> Tensor:
        """This rank's share, differentiable; the shares of all ranks add up to the loss.

        `weight` is what `begin` returned; `rows` of the `total` samples are here, with `per_sample` terms
        each if not all of them are. `lie`: which dim of each tensor of the outputs holds the samples, and
        how many rows of it each has, or None for one that all ranks have alike; by default the leading
        dim, one.
        """
        if self.split is not None:
            summed = None if weight is None else weight.wait()
            whole = self._alone or (
                self._group.size() == 1 and rows == total and per_sample is None
            )
            return self.split.share(
                outputs, targets, summed, rows, total, per_sample=per_sample, whole=whole
            )
        if self.shares:
            return self.over_all(*self.own_terms(outputs, targets))
        if self._group.size() == 1:
            return self.alike(outputs, targets)
        return self._gathered(outputs, targets, rows, lie)

    def own_terms(
        self, outputs: Any, targets: Any, *, recorded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of what a loss that shares itself gives for outputs of this rank.

        With `recorded`, all tile ranks of a replica compute it. The denominator is float64.
        """
        custom: Any = self.loss
        since = _graph_time()
        numerator, denominator = self._called(custom.share, outputs, targets)
        if recorded:
            self._check_graph(numerator, outputs, since)
            self._check_equal(numerator, self._tiles)
        else:
            self._check_leaves(numerator, outputs)
        return numerator, torch.as_tensor(
            denominator, device=self._device
        ).detach().double().clone()

    def over_all(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """This rank's share, from its terms. Collective over replicas."""
        comm.all_reduce(denominator, self._group, Tag.LOSS)
        return numerator / denominator.to(numerator.dtype)

    def _gathered(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        lie: Sequence[tuple[int, int] | None] | None,
    ) -> Tensor:
        self.warn()
        counts = row_counts(rows, self._group, self._device)

        def gather(leaf: Tensor, dim: int = 0, each: int = 1) -> Tensor:
            if leaf.dim() <= dim or leaf.shape[dim] != rows * each:
                raise UsageError(
                    f"an output or target of shape {tuple(leaf.shape)} cannot be gathered for the loss: "
                    f"its leading dim should be the {rows} samples of this rank"
                )
            every = [count * each for count in counts]
            if dim == 0:  # not even a view: a loss may change it in place
                return gather_rows(leaf, every, self._group, Tag.LOSS)
            return gather_rows(leaf.movedim(dim, 0), every, self._group, Tag.LOSS).movedim(0, dim)

        places = iter(lie if lie is not None else [(0, 1)] * len(leaves(outputs)))

        def laid(leaf: Tensor) -> Tensor:
            place = next(places)
            return leaf if place is None else gather(leaf, *place)

        # Computed alike on every rank that has samples, so each contributes its part of one loss.
        found = self.alike(map_tensors(laid, outputs), map_tensors(gather, targets))
        if rows:
            return found / sum(count > 0 for count in counts)
        return found.masked_fill(torch.ones_like(found, dtype=torch.bool), 0.0)

    def alike(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of outputs and targets that all ranks have. Collective over replicas and tiles.

        Raises `UsageError` if it depends on anything else that the forward has made: of that, a rank
        has a part.
        """
        since = _graph_time()
        found = self._called(self.loss, outputs, targets)
        self._check_graph(found, outputs, since)
        self._check_equal(found, self._everyone)
        return found

    def _called(self, function: Callable[..., Any], outputs: Any, targets: Any) -> Any:
        """What the user's function returns."""
        try:
            found = function(outputs, targets)
        except (TypeError, AttributeError) as problem:
            if targets is not None:
                raise
            raise UsageError(
                f"the loss fails without targets, of which step was given none: {problem}"
            ) from problem
        except RuntimeError as problem:
            if not self._reads_elsewhere():
                raise
            raise UsageError(_ELSEWHERE.format(problem=str(problem).splitlines()[0])) from problem
        number = found[0] if isinstance(found, tuple) else found  # pyright: ignore[reportUnknownVariableType]
        if is_dtensor(number) or (
            isinstance(number, Tensor) and number.is_meta and not self._predicts
        ):
            raise UsageError(_ELSEWHERE.format(problem="it gives a tensor without numbers"))
        if isinstance(found, tuple) and function is self.loss:  # only `share` gives two
            number = found
        if not isinstance(number, Tensor) or number.numel() != 1:
            raise UsageError(
                f"the loss gave {_described(number)} instead of a tensor of one number"
            )
        trains = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves(outputs))
        if function is self.loss and trains and not number.requires_grad:
            raise UsageError(
                "the loss has no gradient, though the outputs have: it is detached, or made anew of numbers "
                "(.item(), torch.tensor(...)): return what is computed of the outputs"
            )
        return found  # pyright: ignore[reportUnknownVariableType]

    def _reads_elsewhere(self) -> bool:
        """Whether other ranks hold parameters of the net that a loss may want to read."""
        return any(p.is_meta or is_dtensor(p) for p in self._net.parameters())

    def _check_graph(self, loss: Tensor, outputs: Any, since: int) -> None:
        """Refuse a loss whose graph leads to what the forward has made and not returned."""
        if self._alone:
            return
        known = _functions_of(outputs)
        if _reaches(loss, known, since):
            raise UsageError(
                "the loss depends on a tensor that the net has made and not returned, an attribute say, "
                "of which every rank has its part only: return it from the net's forward"
            )
        self._check_leaves(loss, outputs)

    def _check_leaves(self, loss: Tensor, outputs: Any) -> None:
        """Refuse a loss that trains what is neither the net's nor its own.

        What another stage has returned ends the graph of this rank.
        """
        if self._alone:
            return
        own = self.loss.parameters() if isinstance(self.loss, nn.Module) else ()
        ours = {id(p) for p in (*self._net.parameters(), *own, *leaves(outputs))}
        for leaf in trained_by(loss, _functions_of(outputs)):
            if id(leaf) not in ours and not is_dtensor(leaf):
                raise UsageError(
                    f"the loss trains a tensor of shape {tuple(leaf.shape)} that is a parameter neither "
                    "of the net nor of the loss, so its gradient would not be summed over ranks: let the "
                    "loss be an nn.Module that holds it as a parameter"
                )

    def _check_equal(self, loss: Tensor, group: dist.ProcessGroup) -> None:
        """Refuse a loss that ranks compute of the same and find different."""
        if group.size() == 1 or self._predicts:
            return
        own = loss.detach().reshape(1).to(torch.float64)
        every = comm.all_gather(own, group, Tag.LOSS).flatten().cpu()
        rtol = min(_APART * torch.finfo(loss.dtype).eps, 0.1)
        apart = ~torch.isclose(every, every[0], rtol=rtol, atol=0.0, equal_nan=True)
        if apart.any():
            other = int(apart.nonzero()[0])
            raise UsageError(
                f"ranks get different losses from the same outputs and targets: {float(every[0]):.6g} "
                f"and {float(every[other]):.6g}. It depends on something else: numbers that the forward "
                "has left in an attribute, of which each rank has its part, or random ones. Return them "
                "from the net's forward"
            )

    def warn(self) -> None:
        """Tell once that outputs are gathered for the loss."""
        if self._warned:
            return
        self._warned = True
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        warn(
            f"the loss {name!r} is not one that Fivefold can take apart, so outputs and targets of all ranks "
            "are gathered for it: exact, at the cost of that traffic in every step. Give it a method "
            "share(outputs, targets) -> (numerator, denominator) to avoid it.",
        )


_ELSEWHERE = (
    "the loss cannot be computed here: {problem}. It reads parameters of the net that this rank does "
    'not hold (a pipe axis, or memory.shard = "parameters"): let the forward return what it needs of them'
)


def _described(found: Any) -> str:
    return (
        f"a tensor of shape {tuple(found.shape)}"
        if isinstance(found, Tensor)
        else type(found).__name__
    )


def _functions_of(outputs: Any) -> set[Any]:
    """Of the graph of what the net has returned, where it ends."""
    return {leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None}


def _graph_time() -> int:
    """The number that autograd gives to what this thread computes now; it only grows."""
    with torch.enable_grad():
        probe = torch.zeros((), requires_grad=True) * 1
    assert probe.grad_fn is not None
    return _number(probe.grad_fn)


def _number(function: Any) -> int:
    return sequence_number(function)


def _reaches(loss: Tensor, known: Iterable[Any], since: int) -> bool:
    """Whether a graph leads to something made before `since`, other than `known` and leaves."""
    return any(
        not hasattr(function, "variable") and _number(function) < since
        for function in functions(loss, known)
    )
