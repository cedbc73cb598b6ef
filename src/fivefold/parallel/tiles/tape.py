"""What a net calls, recorded by running it once on tensors that have a shape but no numbers.

    net(x)        v1 = conv2d(v0, body.weight, None, stride=(2, 2), ...)      in module body
                  v2 = batch_norm(v1, ...)                                    in module norm
                  v3 = relu(v2)                                               in module act

The unmodified forward runs as it is: its control flow may depend on shapes, on options, on anything but the
numbers themselves. Calls are seen through a torch function mode, so modules and functional calls look alike,
and every call is one that torch documents. In-place calls make a new value, as in any SSA form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from fivefold.errors import UsageError
from fivefold.parallel.intercept import draws_mask
from fivefold.parallel.tiles.names import base_name, is_in_place
from fivefold.parallel.trees import leaves, map_tensors

__all__ = ["Constant", "Node", "Ref", "Slot", "State", "Tape", "Value", "record"]


@dataclass(frozen=True)
class Value:
    """A tensor that the net computes, or one of its inputs."""

    index: int


@dataclass(frozen=True)
class State:
    """A parameter or buffer, by its name; looked up anew at every run."""

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the net holds without having registered it."""

    tensor: Tensor


Ref = Value | State | Constant


@dataclass(frozen=True)
class Slot:
    """Where operand `index` of a node goes among its arguments."""

    index: int


@dataclass(frozen=True, eq=False)
class Node:
    """One call."""

    function: Callable[..., Any]
    """what was called: a function or method of torch, or a module that is taken as one operation"""
    name: str
    """its name, without the marks of methods, operators and in-place variants: `add` for `x += y`"""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """with a `Slot` for every tensor"""
    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]
    """of the operands"""
    outputs: tuple[int, ...]
    """values that it makes"""
    output_shapes: tuple[tuple[int, ...], ...]
    output_bytes: int
    """of one element of the first output"""
    returns: Any
    """tree spec of what it returns"""
    scope: str
    """name of the module that called"""
    call: int
    """how many nodes of this name and module came before"""
    draw: int
    """how many calls of this module that draw a mask came before: masks are a function of it"""
    grad: bool
    """whether it ran with gradients enabled"""

    def arguments(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call `function` with, given the operands."""

        def put(leaf: Any) -> Any:
            return operands[leaf.index] if isinstance(leaf, Slot) else leaf

        return tree_map(put, (self.args, self.kwargs))

    def bound(self, names: Sequence[str]) -> dict[str, Any]:
        """The arguments by name, given the names of the positional ones; tensors are `Slot`s."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def where(self) -> str:
        """How messages name this node."""
        return f"{self.name} in {self.scope!r}" if self.scope else f"{self.name} in the net"


@dataclass
class Tape:
    """A recorded net."""

    nodes: list[Node]
    inputs: tuple[int, ...]
    """values of the input tensors, in the order of `leaves`"""
    shapes: dict[int, tuple[int, ...]]
    dtypes: dict[int, torch.dtype]
    outputs: Any
    """tree of what the net returns, with a `Ref` for every tensor"""
    uses: Counter[int] = field(default_factory=Counter[int])
    """how many nodes and outputs read a value"""

    def element_bytes(self, ref: Ref) -> int:
        """Size of one element of a tensor."""
        return (
            self.dtypes[ref.index].itemsize
            if isinstance(ref, Value) and ref.index in self.dtypes
            else 4
        )


# Taken as one operation: they read their own buffers' numbers, or are known by their module only.
_WHOLE_MODULES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def record(
    net: nn.Module,
    call: Callable[[Callable[..., Any], Any], Any],
    inputs: Any,
    shapes: Sequence[torch.Size],
) -> Tape:
    """Run `call(net, inputs)` on fake tensors and note every call.

    Args:
        net: the user's net; neither its parameters nor its buffers change.
        call: how the net is called with a tree of inputs.
        inputs: a tree with this rank's tensors, of which dtype and device count.
        shapes: the shape that each of them stands for, in the order of `leaves`.

    Raises `UsageError` where the net's control flow depends on numbers, which names the module.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        sizes = iter(shapes)
        device = next((p.device for p in net.parameters()), torch.device("cpu"))
        stand_ins = map_tensors(
            lambda t: torch.empty(next(sizes), dtype=t.dtype, device=device), inputs
        )
        state = {
            name: fake.from_tensor(tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in (*net.named_parameters(), *net.named_buffers())
        }
        recorder = _Recorder(state, leaves(stand_ins))
        with recorder.modules(net), torch.enable_grad():
            with recorder:
                returned = recorder.run(lambda tree: call(_with_state(net, state), tree), stand_ins)
            recorder.check_outputs(returned)
    outputs = map_tensors(recorder.ref, returned)  # pyright: ignore[reportArgumentType]
    return recorder.tape(outputs)


def _with_state(net: nn.Module, state: dict[str, Tensor]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(net, state, args, kwargs)

    return run


class _Recorder(TorchFunctionMode):
    def __init__(self, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._nodes: list[Node] = []
        self._held: list[Tensor] = []
        """every tensor seen: an id means nothing once its tensor is gone"""
        self._refs: dict[int, Ref] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._draws: Counter[str] = Counter()
        self._scopes: list[str] = [""]
        self._silent = False
        self._stale: set[int] = set()
        """ids of tensors whose memory another one has changed"""
        for name, tensor in state.items():
            self._refs[id(tensor)] = State(name)
            self._held.append(tensor)
        self._inputs = tuple(self._new(tensor) for tensor in inputs)

    # ---- running

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = base_name(func)
        if name == "__setitem__":
            self._refuse(
                "assigns to a part of a tensor (x[...] = y), which cannot be followed into tiles: "
                "torch.cat or torch.where say the same"
            )
        if not self._silent and any(isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0]):
            self._note(func, name, args, kwargs, result)
        return result

    def run(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        try:
            return function(inputs)
        except DataDependentOutputException as problem:
            self._depends(problem)

    def _depends(self, cause: Exception) -> NoReturn:
        self._refuse(
            "depends on the numbers of a tensor (an if, a loop, .item(), nonzero): what each tile has to "
            "compute cannot be planned. Let it depend on shapes or options, or use torch.where",
            cause,
        )

    @contextmanager
    def modules(self, net: nn.Module) -> Generator[None]:
        """Within the block, calls know the module that makes them."""
        found = dict(net.named_modules())
        before = {name: module.__dict__.get("forward") for name, module in found.items()}
        for name, module in found.items():
            module.__dict__["forward"] = self._entered(name, module, module.forward)
        try:
            yield
        finally:
            for name, module in found.items():
                if before[name] is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before[name]

    def _entered(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            self._scopes.append(name)
            try:
                if type(module) in _WHOLE_MODULES:
                    return self._as_one(module, *args, **kwargs)
                return forward(*args, **kwargs)
            except DataDependentOutputException as problem:
                self._depends(problem)
            finally:
                self._scopes.pop()

        return enter

    def _as_one(self, module: nn.Module, x: Tensor) -> Tensor:
        """A module as one operation: its result has the shape and dtype of what it is given."""
        self._silent = True
        try:
            result = x * 1
        finally:
            self._silent = False
        self._note(module, type(module).__name__, (x,), {}, result)
        return result

    # ---- noting

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        operands: list[Ref] = []
        shapes: list[tuple[int, ...]] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            operands.append(self.ref(leaf))
            shapes.append(tuple(leaf.shape))
            return Slot(len(operands) - 1)

        if is_in_place(func) or kwargs.get("out") is not None or kwargs.get("inplace"):
            self._check_in_place(args[0] if args else None, kwargs)
        placed_args, placed_kwargs = tree_map(place, (args, kwargs))
        flat, returns = tree_flatten(result)
        made = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        scope = self._scopes[-1]
        self._nodes.append(
            Node(
                function=func,
                name=name,
                args=placed_args,
                kwargs=placed_kwargs,
                operands=tuple(operands),
                shapes=tuple(shapes),
                outputs=tuple(self._new(leaf) for leaf in made),
                output_shapes=tuple(tuple(leaf.shape) for leaf in made),
                output_bytes=made[0].element_size(),
                returns=returns,
                scope=scope,
                call=self._calls[scope, name],
                draw=self._draws[scope],
                grad=torch.is_grad_enabled(),
            )
        )
        self._calls[scope, name] += 1
        self._draws[scope] += draws_mask(func, args, kwargs)

    def _check_in_place(self, target: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("out") is not None:
            self._refuse(
                "writes into out=..., which cannot be followed into tiles: use what it returns"
            )
        if not isinstance(target, Tensor):
            return
        if isinstance(self.ref(target), (State, Constant)):
            self._refuse(
                "changes a parameter, a buffer or a constant in place, which cannot be followed into tiles"
            )
        storage = _storage(target)
        self._stale.update(id(t) for t in self._held if t is not target and _storage(t) == storage)

    def _new(self, tensor: Tensor) -> int:
        index = len(self._shapes)
        self._refs[id(tensor)] = Value(index)
        self._held.append(tensor)
        self._shapes[index] = tuple(tensor.shape)
        self._dtypes[index] = tensor.dtype
        return index

    def ref(self, tensor: Tensor) -> Ref:
        """What `tensor` is called here."""
        if id(tensor) in self._stale:
            self._refuse(
                "uses a tensor of which another view was changed in place: what it sees would differ in "
                "tiles. Use the variant that returns a new tensor"
            )
        if id(tensor) not in self._refs:
            if isinstance(tensor, FakeTensor):
                self._refuse("uses a tensor that was made where calls cannot be seen")
            self._refs[id(tensor)] = Constant(tensor)
            self._held.append(tensor)
        return self._refs[id(tensor)]

    def check_outputs(self, returned: Any) -> None:
        """Refuse what recording does not see: the backward of a user's autograd function."""
        seen, todo = set[Any](), [t.grad_fn for t in leaves(returned)]
        while todo:
            function = todo.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            if isinstance(function, torch.autograd.function.BackwardCFunction):
                name = type(function).__name__.removesuffix("Backward")
                hint = (
                    "torch.utils.checkpoint with use_reentrant=False, or memory.recompute in the plan"
                    if name.startswith("Checkpoint")
                    else "torch's own functions"
                )
                self._refuse(
                    f"uses the autograd function {name}, whose backward cannot be followed into tiles: "
                    f"use {hint}"
                )
            todo.extend(following for following, _ in function.next_functions)

    def _refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        module = f"the module {self._scopes[-1]!r}" if self._scopes[-1] else "the net"
        raise UsageError(f"{module} {why}") from cause

    def tape(self, outputs: Any) -> Tape:
        uses = Counter(
            ref.index for node in self._nodes for ref in node.operands if isinstance(ref, Value)
        )
        flat, _ = tree_flatten(outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
        uses.update(leaf.index for leaf in flat if isinstance(leaf, Value))
        return Tape(self._nodes, self._inputs, self._shapes, self._dtypes, outputs, uses)


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor is a view of."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
