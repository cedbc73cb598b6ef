"""What a node calls of torch when it is computed, and whether that is the same in every step.

A rule's code reads shapes and numbers of the plan, which do not change; what it calls in the end is a list:

    max_pool2d of a tile     ──►  c0 = pad(given 0, ...);  c1 = max_pool2d(c0, 3, 2)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.parallel.graph.names import is_users
from fivefold.parallel.program.program import Compute
from fivefold.parallel.program.rule import Moment
from fivefold.torch_private import TorchDispatchMode, pytree

__all__ = ["FromCall", "Given", "Trace", "watched"]


@dataclass(frozen=True)
class FromCall:
    """What a call has returned, or the tensor number `leaf` of it."""

    call: int
    leaf: int | None


@dataclass(frozen=True)
class Given:
    """Operand number `number`; or of the module that the node is, the tensor `name`."""

    number: int = -1
    name: str = ""


@dataclass
class Trace:
    """Of one node."""

    calls: list[tuple[Callable[..., Any], Any]] = field(
        default_factory=list[tuple[Callable[..., Any], Any]]
    )
    """functions with (args, kwargs), where `FromCall` and `Given` stand for tensors"""
    results: list[FromCall | Given] = field(default_factory=list[FromCall | Given])
    """the tensors that the node gives"""
    why: str = ""
    """it is no list of calls that is the same in every step; empty if it is"""
    told: bool = False
    """whether a user can do something about that"""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """of the moment: what it was computed by"""


_METADATA = frozenset({
    "__len__", "_is_view", "device", "dim", "dtype", "element_size", "grad_fn", "is_complex", "is_conj",
    "is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_mkldnn", "is_neg",
    "is_nested", "is_quantized", "is_sparse", "is_xla", "itemsize", "layout", "names", "nbytes", "ndim",
    "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset", "stride",
})  # fmt: skip
"""what is the same whenever tensors of the same shapes are given"""
_EFFECTS = frozenset({"__setitem__", "_set_grad_enabled"})
"""what returns nothing, and belongs to the list"""
_REFUSED = frozenset({
    "_make_subclass", "backward", "data", "data_ptr", "grad", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "resize_", "retain_grad", "set_",
    "untyped_storage",
})  # fmt: skip
_OTHERS = frozenset({"budget", "groups", "key", "lines"})
"""of a `Moment`: what other ranks, or the number of the step, have a part in"""
_FACTS = frozenset({"joint", "pieces", "rows", "total", "updates"})
"""of a `Moment`: what may differ from batch to batch of one shape"""


def watched(step: Compute, moment: Moment, operands: Sequence[Tensor]) -> tuple[Any, Trace]:
    """What a node computes, and what it calls for that."""
    node, watching, seen = step.node, _Watching(step, operands), _SeenMoment(moment)
    device = operands[0].device if operands else torch.device("cpu")
    before, seeded = _random_state(device), _Seeded()
    with watching, seeded:
        result = step.local.run(cast(Moment, seen), operands)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if step.local.collective or seen.others:
        watching.trace = Trace(why="has a part in what other ranks do, or in the step")
    if not node.grad:
        watching.refuse("runs without gradients", told=False)
    # Attention counts as seeded without dropout too; and what draws elsewhere may be another thread.
    if seeded.seen and not torch.equal(before, _random_state(device)):
        watching.refuse("draws random numbers", told=False)
    if is_users(node.function):
        watching.refuse("is a function of the user's")
    if _has_python_backward(tensors, operands):
        watching.refuse("has a backward in Python")
    watching.finish(tensors)
    watching.trace.facts = seen.facts
    return result, watching.trace


def _has_python_backward(results: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
    """Whether between operands and results there is a `torch.autograd.Function`, whose backward is Python."""
    ends = {tensor.grad_fn for tensor in operands if tensor.grad_fn is not None}
    due: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen = {*ends}
    while due:
        node = due.pop()
        if node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        due += [one for one, _ in node.next_functions if one is not None]
    return False


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class _Seeded(TorchDispatchMode):
    """Notes whether something was computed that may draw random numbers."""

    seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _SeenMoment:
    """A moment that notes what was used: whether something of `_OTHERS`, and which `_FACTS`."""

    def __init__(self, moment: Moment) -> None:
        self._moment, self.others = moment, False
        self.facts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._moment, name)
        self.others |= name in _OTHERS
        if name in _FACTS:
            self.facts[name] = found
        return found

    @property
    def note(self) -> Callable[[Any], None] | None:
        """What is noted is no tensor of a graph."""
        note = self._moment.note
        if note is None:
            return None

        def noted(due: Any) -> None:
            self.others = True
            note(due)

        return noted

    def statistics(self, axes: tuple[int, ...]) -> Any:
        """See `Moment`: a group of one rank sends nothing."""
        group = self._moment.statistics(axes)
        self.others |= group.size() > 1
        return group


class _Watching(TorchFunctionMode):
    """Writes down the calls of one node."""

    def __init__(self, step: Compute, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.trace = Trace()
        self._known: dict[int, FromCall | Given] = {}
        self._alive: list[Tensor] = []
        """so that no address is used twice"""
        function = step.node.function
        if isinstance(function, nn.Module):
            named = itertools.chain(function.named_parameters(), function.named_buffers())
            for name, tensor in named:
                self._learn(tensor, Given(name=name))
        for number, tensor in enumerate(operands):
            self._learn(tensor, Given(number))

    def _learn(self, tensor: Tensor, known: FromCall | Given) -> None:
        self._known[id(tensor)] = known
        self._alive.append(tensor)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        result = func(*args, **(kwargs or {}))
        if not self.trace.why:
            self._note(func, (args, kwargs or {}), result)
        return result

    def _note(self, func: Any, arguments: Any, result: Any) -> None:
        name, leaves = _name_of(func), pytree.tree_leaves(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            if name in _METADATA:
                return
            if name not in _EFFECTS:
                self.refuse(f"calls {name}, whose result is no tensor")
        if name in _REFUSED:
            self.refuse(f"calls {name}")
        arguments = pytree.tree_map_only(Tensor, self._as_known, arguments)
        if self.trace.why:
            return
        number = len(self.trace.calls)
        self.trace.calls.append((func, arguments))
        for leaf, tensor in enumerate(leaves):
            if isinstance(tensor, Tensor):
                self._learn(tensor, FromCall(number, None if tensor is result else leaf))

    def _as_known(self, tensor: Tensor) -> FromCall | Given | None:
        found = self._known.get(id(tensor))
        if found is None:
            self.refuse("reads a tensor that is neither given to it nor its module's")
        return found

    def refuse(self, why: str, *, told: bool = True) -> None:
        """It is no list of calls."""
        if not self.trace.why:
            self.trace.why, self.trace.told = why, told

    def finish(self, results: Iterable[Tensor]) -> None:
        """What it gives is known."""
        known = [self._as_known(tensor) for tensor in results]
        self.trace.results = [one for one in known if one is not None]


def _name_of(func: Any) -> str:
    """Of a function, or of what is asked of a tensor."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name
