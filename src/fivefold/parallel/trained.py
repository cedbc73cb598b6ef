"""What a step trains besides the parameters of the net and of its loss, whose gradients nobody would sum.

A tensor that asks for a gradient and that no module holds as a parameter gets this rank's part of it: of its
samples, its tile or its stage. Such tensors are looked for among what the net reads, where it is recorded;
among what computed the inputs and targets; and in the graph of the loss, in the first steps and then rarely.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.trees import leaves
from fivefold.torch_private import is_dtensor

if TYPE_CHECKING:
    from fivefold.parallel.graph.tape import Tape

__all__ = ["begun", "check_given", "check_read", "check_trained", "functions", "trained_by"]

_BEGUN = "_fivefold_begun"


def begun(x: Tensor) -> Tensor:
    """The same numbers as the begin of a graph, for the sake of its backward; nobody reads its gradient."""
    leaf = x.detach().requires_grad_()
    setattr(leaf, _BEGUN, True)
    return leaf


def check_given(inputs: Any, targets: Any) -> None:
    """Refuse inputs and targets that were computed of what asks for gradients."""
    if any(leaf.requires_grad and not leaf.is_leaf for leaf in (*leaves(inputs), *leaves(targets))):
        raise UsageError(
            "an input or target of model.step was computed with gradients (by another model, or from a "
            "tensor that is trained), which would be those of this rank's samples: detach it, compute it "
            "within the net, or call model(x) and loss.backward() in place of model.step"
        )


def check_read(tape: Tape) -> None:
    """Refuse a net that reads what asks for gradients and is no parameter of it."""
    for what in tape.trained:
        raise UsageError(
            f"the net trains {what}, which is no parameter of it, so its gradient would not be summed over "
            "ranks: register it (nn.Parameter, nn.ModuleList in place of a list), or call "
            "requires_grad_(False)"
        )


def check_trained(share: Tensor, known: Iterable[Tensor]) -> None:
    """Refuse a share of the loss whose graph leads to others than `known`.

    But for those that only the graph holds: the forward has made them for itself, as for slopes of its own.
    """
    ours = {id(tensor) for tensor in known}
    found = trained_by(share)
    while found:
        leaf = found.pop()
        if id(leaf) in ours or is_dtensor(leaf) or hasattr(leaf, _BEGUN):
            continue
        if gc.get_referrers(leaf):
            raise UsageError(
                f"the step trains a tensor of shape {tuple(leaf.shape)} that is a parameter neither of the "
                "net nor of the loss, so its gradient would not be summed over ranks: register it "
                "(nn.Parameter, nn.ModuleList in place of a list), or call requires_grad_(False)"
            )


def trained_by(loss: Tensor, known: Iterable[Any] = ()) -> list[Tensor]:
    """The tensors that backward gives gradients, without going beyond `known` functions."""
    return [f.variable for f in functions(loss, known) if hasattr(f, "variable")]


def functions(loss: Tensor, known: Iterable[Any] = ()) -> list[Any]:
    """All functions of a graph, but for `known` and what is behind them."""
    seen, todo, found = set(known), [loss.grad_fn], list[Any]()
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        found.append(function)
        todo.extend(inner for inner, _ in function.next_functions)
    return found
