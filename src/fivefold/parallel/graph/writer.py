"""The nodes of a recording as they are written, and what every tensor is called.

What a call changes in place becomes a new value, and so does everything that shares its memory:

    v = x[:, 1]        v is a view of x
    v.mul_(2)          v' = mul(v, 2);  x' = assigned(x, v')
    w = x + 1          reads x'; other views of x are made again from x' once they are read
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.errors import UsageError
from fivefold.parallel.graph.functional import Functional, assigned, renumbered
from fivefold.parallel.graph.refs import Constant, Ref, Slot, StateRef, Value, filled
from fivefold.parallel.graph.tape import Autocast, Node
from fivefold.parallel.graph.writes import Writes, user_line
from fivefold.parallel.intercept import draws_mask
from fivefold.torch_private import KEPT_APPLY_SEEN, pytree

__all__ = ["Writer", "tensors_of"]

_DETACHED = frozenset({"detach", "data"})
_SAME_NUMBERS = frozenset({
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel", "view_as", "reshape_as",
    "atleast_1d", "atleast_2d", "atleast_3d", "contiguous", "alias",
})  # fmt: skip
_REORDERED = frozenset({
    "permute", "transpose", "T", "mT", "t", "movedim", "moveaxis", "swapaxes", "swapdims",
})  # fmt: skip


@dataclass(frozen=True)
class _View:
    """How a tensor was made of another one whose memory it shares."""

    parent: Tensor
    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]
    """all results of the call"""
    grad: bool


class Writer(TorchFunctionMode):
    """Nodes, and names of tensors.

    Args:
        named: tensors that the net holds, with what they are called.
        inputs: stand-ins of the inputs.
        writes: the mode below.
        device: where the net computes.
    """

    def __init__(
        self,
        named: Sequence[tuple[Tensor, StateRef]],
        inputs: Sequence[Tensor],
        writes: Writes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.held: list[Tensor] = []
        """every tensor seen: an id means nothing once its tensor is gone"""
        self.scopes: list[str] = [""]
        """the modules that are running"""
        self._writes, self._device = writes, device
        self._refs: dict[int, Ref] = {}
        self._current: dict[int, int] = {}
        """by tensor: which state of its memory its ref stands for"""
        self._states: dict[int, int] = {}
        """by storage: how often it was changed"""
        self._silent = False
        """whether calls are not noted now"""
        self._leaves: set[int] = set()
        """tensors that had no gradient when they were given their ref"""
        self._views: dict[int, _View] = {}
        self._used: set[int] = set()
        """storages whose numbers autograd may have kept"""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._draws: Counter[str] = Counter()
        self._again = 0
        """within how many parts that one process runs twice"""
        self.passes: dict[str, set[int]] = {}
        """by parameter: the backward passes of one process that read it, 0 being the one around all"""
        self._pass, self._numbers = 0, itertools.count(1)
        self._around = self._autocast()
        self.named = [(tensor, self._bind(tensor, ref)) for tensor, ref in named]
        self.inputs = tuple(self._new(tensor) for tensor in inputs)

    @contextmanager
    def own_pass(self) -> Generator[None]:
        """One process goes backward through the block in a pass of its own."""
        outside, self._pass = self._pass, next(self._numbers)
        try:
            yield
        finally:
            self._pass = outside

    # ---- nodes

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, list[Tensor], list[Ref]]:
        """Arguments with slots in the place of tensors; these, and what they are called."""
        operands: list[Tensor] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            operands.append(leaf)
            return Slot(len(operands) - 1)

        placed = pytree.tree_map(place, (tuple(args), kwargs))
        return placed, operands, [self.ref(leaf) for leaf in operands]

    def _emit(  # noqa: PLR0917 - the parts of a node
        self,
        func: Any,
        name: str,
        placed: tuple[Any, Any],
        refs: Sequence[Ref],
        shapes: Sequence[tuple[int, ...]],
        outputs: Sequence[int],
        *,
        grad: bool | None = None,
        stops: bool = False,
    ) -> None:
        scope, autocast = self.scopes[-1], self._autocast()
        held = func.parameters(recurse=False) if isinstance(func, nn.Module) else ()
        for ref in (*refs, *(self.ref(parameter) for parameter in held)):
            if isinstance(ref, StateRef):
                self.passes.setdefault(ref.name, set()).add(self._pass)
        self.nodes.append(
            Node(
                function=func,
                name=name,
                args=placed[0],
                kwargs=placed[1],
                operands=tuple(refs),
                shapes=tuple(shapes),
                outputs=tuple(outputs),
                output_shapes=tuple(self.shapes[index] for index in outputs),
                output_bytes=self.dtypes[outputs[0]].itemsize if outputs else 0,
                scope=scope,
                call=self._calls[scope, name],
                draw=self._draws[scope],
                grad=torch.is_grad_enabled() if grad is None else grad,
                autocast=None if autocast == self._around else autocast,
                line=user_line(),
                again=self._again > 0,
                stops=stops,
            )
        )
        self._calls[scope, name] += 1
        self._draws[scope] += draws_mask(func, *placed)

    def _autocast(self) -> Autocast:
        kind = self._device.type
        return (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def _viewed(  # noqa: PLR0917 - one call, and what came of it
        self,
        leaf: Tensor,
        parent: Tensor,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        made: Sequence[Tensor],
    ) -> None:
        """A result shares its memory with an operand."""
        grad = torch.is_grad_enabled()
        self._views[id(leaf)] = _View(parent, func, name, args, kwargs, list(made), grad)

    # ---- what is changed in place

    def _overwrite(self, tensor: Tensor, ref: Ref, graded: bool) -> None:
        """From here on the numbers of `tensor` are `ref`; so are those of what it is a view of."""
        silent = not torch.is_grad_enabled() or tensor.is_leaf
        if graded and silent:
            ref = self._renumber(self._refs[id(tensor)], ref, tensor)
        line: list[tuple[_View, Ref]] = []
        view = self._views.get(id(tensor))
        while view is not None:
            if view.name == "data":
                self._check_kept(view.parent)
            line.append((view, self.ref(view.parent)))
            view = self._views.get(id(view.parent))
        self._states[self._writes.storage(tensor)] += 1
        self._bind(tensor, ref)
        child = tensor
        for view, before in line:
            ref = self._put_back(view, child, before, ref)
            if view.name in _DETACHED or (silent and view.parent.requires_grad):
                ref = self._renumber(before, ref, view.parent)
            child = view.parent
            self._bind(child, ref)

    def _put_back(self, view: _View, child: Tensor, before: Ref, ref: Ref) -> Ref:
        """What a tensor becomes when a view of it becomes `ref`."""
        parent, value = view.parent, self._value
        shape, given = tuple(parent.shape), [tuple(child.shape)]
        same = child.numel() == parent.numel() and child.dtype == parent.dtype
        if view.name in _DETACHED:
            return ref
        made = [value(parent)]
        if same and view.name in _SAME_NUMBERS:
            self._emit(torch.reshape, "reshape", ((Slot(0), shape), {}), [ref], given, made)
        elif same and view.name in _REORDERED:
            placed = ((Slot(0), _inverse_order(view)), {})
            self._emit(torch.permute, "permute", placed, [ref], given, made)
        elif view.name == "__getitem__" and _is_basic(view.args[1]):
            placed = ((Slot(0), view.args[1], Slot(1)), {})
            self._emit(assigned, "assigned", placed, [before, ref], [shape, *given], made)
        else:
            self._write_by(view, child, [before, ref], made)
        return Value(made[0])

    def _write_by(self, view: _View, child: Tensor, refs: list[Ref], made: list[int]) -> None:
        """By the view itself: of a copy, into which the new numbers are copied."""
        number = next(n for n, one in enumerate(view.made) if one is child)
        others: list[Tensor] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf is view.parent:
                return Slot(0)
            others.append(leaf)
            return Slot(len(others) + 1)

        placed, function = pytree.tree_map(place, (view.args, view.kwargs)), view.function

        def write(*operands: Tensor) -> None:  # keeps no tensor of the recording
            args, kwargs = filled(placed, operands)
            tensors_of(function(*args, **kwargs))[number].copy_(operands[1])

        slots = tuple(Slot(position) for position in range(len(others) + 2))
        shapes = [tuple(t.shape) for t in (view.parent, child, *others)]
        refs = [*refs, *(self.ref(leaf) for leaf in others)]
        call = Functional(write, (slots, {}), (0,))
        self._emit(call, f"{view.name} in place", (slots, {}), refs, shapes, made)

    def _renumber(self, before: Ref, after: Ref, like: Tensor) -> Ref:
        """`after` where autograd sees `before`."""
        value, shape = self._value(like), tuple(like.shape)
        placed = ((Slot(0), Slot(1)), {})
        self._emit(
            renumbered, "renumbered", placed, [before, after], [shape] * 2, [value], grad=True
        )
        return Value(value)

    def _check_kept(self, tensor: Tensor) -> None:
        """Refuse numbers that change behind autograd's back once it may have kept them."""
        own = isinstance(self._refs.get(id(tensor)), (StateRef, Constant))
        if (own or tensor.requires_grad) and self._writes.storage(tensor) in self._used:
            self.refuse(
                "changes a tensor by .data that it has computed with before: its backward would use the "
                "new numbers"
            )

    # ---- what tensors are called

    def _value(self, like: Tensor) -> int:
        if like.layout is not torch.strided:
            self.refuse(
                "makes a sparse tensor, which cannot be divided: keep it dense, or make it beforehand and "
                "register it as a buffer"
            )
        index = len(self.shapes)
        self.shapes[index], self.dtypes[index] = tuple(like.shape), like.dtype
        return index

    def _new(self, tensor: Tensor) -> int:
        index = self._value(tensor)
        self._bind(tensor, Value(index))
        return index

    def _bind(self, tensor: Tensor, ref: Ref) -> Ref:
        storage = self._writes.storage(tensor)
        self._refs[id(tensor)] = ref
        self._current[id(tensor)] = self._states.setdefault(storage, 0)
        (self._leaves.discard if tensor.requires_grad else self._leaves.add)(id(tensor))
        self.held.append(tensor)
        return ref

    def ref(self, tensor: Tensor) -> Ref:
        """What `tensor` is called here."""
        if id(tensor) not in self._refs:
            if self._writes.own(tensor):
                self.refuse("uses a tensor that was made where calls cannot be seen")
            self.named.append((tensor, self._bind(tensor, Constant(tensor))))
        if self._is_stale(tensor):
            self._make_again(tensor)
        self._check_flag(tensor)
        return self._refs[id(tensor)]

    def check_flags(self) -> None:
        """Refuse tensors of the net that the forward has frozen or thawed."""
        for tensor, _ in self.named:
            self._check_flag(tensor)

    def _check_flag(self, tensor: Tensor) -> None:
        changed = tensor.requires_grad == (id(tensor) in self._leaves)
        if not changed or not isinstance(self._refs[id(tensor)], (StateRef, Constant)):
            return
        silent, self._silent = self._silent, True
        leaf, self._silent = tensor.grad_fn is None, silent
        if leaf:
            self.refuse(
                "freezes or thaws a parameter (requires_grad) in its forward: do it between steps"
            )

    def _is_stale(self, tensor: Tensor) -> bool:
        """Whether its memory was changed by way of another tensor."""
        return self._current[id(tensor)] != self._states[self._writes.storage(tensor)]

    def check_seen(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that had no gradient when they were seen, and have one before the next call."""
        silent, self._silent = self._silent, True
        try:
            found = any(
                id(t) in self._leaves and t.grad_fn is not None and not self._is_stale(t)
                for t in tensors
            )
        finally:
            self._silent = silent
        if found:
            kept = ", or with this torch an autograd function kept as f = F.apply"
            self.refuse(
                "uses a tensor whose gradient is computed where calls cannot be seen, by a scripted function "
                f"(torch.jit){'' if KEPT_APPLY_SEEN else kept}: call the plain function"
                f"{'' if KEPT_APPLY_SEEN else ', or F.apply(x)'}"
            )

    def _make_again(self, tensor: Tensor) -> None:
        """Make a view again whose memory was changed by way of another tensor."""
        view = self._views.get(id(tensor))
        if view is None:
            self.refuse(
                "uses a tensor whose memory another one has changed: what it sees cannot be followed. "
                "Use the variant that returns a new tensor"
            )
        self.ref(view.parent)
        placed, operands, refs = self._placed(view.args, view.kwargs)
        values = [self._value(one) for one in view.made]
        shapes = [tuple(t.shape) for t in operands]
        self._emit(view.function, view.name, placed, refs, shapes, values, grad=view.grad)
        now = self._states[self._writes.storage(tensor)]
        for made, value in zip(view.made, values, strict=True):
            if self._current[id(made)] != now:
                self._bind(made, Value(value))

    def output(self, tensor: Tensor) -> Value:
        """A tensor that the net returns, as a value."""
        self.check_seen([tensor])
        ref = self.ref(tensor)
        if not isinstance(ref, Value):
            value, shape = self._value(tensor), tuple(tensor.shape)
            self._emit(torch.clone, "clone", ((Slot(0),), {}), [ref], [shape], [value], grad=True)
            ref = Value(value)
        return ref

    def written(self) -> list[tuple[StateRef | Constant, Ref]]:
        """Tensors of the net's, or of its user's, whose numbers have become others."""
        found: list[tuple[StateRef | Constant, Ref]] = []
        for tensor, before in self.named:
            now = self._refs[id(tensor)]
            if now != before and isinstance(before, (StateRef, Constant)):
                found.append((before, self.ref(tensor)))
        return found

    def refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raise `UsageError`, naming the module and the line of the user's."""
        module = f"the module {self.scopes[-1]!r}" if self.scopes[-1] else "the net"
        line = user_line()
        raise UsageError(f"{module}{f' ({line})' if line else ''} {why}") from cause


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_basic(index: Any) -> bool:
    """Whether an index names rows by numbers and slices only."""
    return all(
        entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int
        for entry in (index if isinstance(index, tuple) else (index,))
    )


def _inverse_order(view: _View) -> list[int]:
    """The order of dims that undoes a view's."""
    probe = torch.empty([dim + 1 for dim in range(view.parent.dim())], device="meta")
    order = [n - 1 for n in view.function(probe, *view.args[1:], **view.kwargs).shape]
    return [order.index(dim) for dim in range(len(order))]
