"""What a net calls, recorded by running it once on tensors that have a shape but no numbers.

The unmodified forward runs as it is: its control flow may depend on shapes, on options, on anything but the
numbers themselves. Calls are seen through a torch function mode, so modules and functional calls look alike,
and every call is one that torch documents. In-place calls make a new value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
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
from fivefold.parallel.tiles.names import asks_in_place, base_name
from fivefold.parallel.tiles.tape import Constant, Node, Ref, Slot, State, Tape, Value
from fivefold.parallel.trees import leaves, map_tensors

__all__ = ["record"]


# Taken as one operation: they read their own buffers' numbers, or are known by their module only.
_WHOLE_MODULES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def record(
    net: nn.Module,
    call: Callable[[Callable[..., Any], Any], Any],
    inputs: Any,
    shapes: Sequence[torch.Size],
    device: torch.device | None = None,
) -> Tape:
    """Run `call(net, inputs)` on fake tensors and note every call.

    Args:
        net: the user's net; neither its parameters nor its buffers change.
        call: how the net is called with a tree of inputs.
        inputs: a tree with this rank's tensors, of which dtype and device count.
        shapes: the shape that each of them stands for, in the order of `leaves`.
        device: where the net computes, by default where its first parameter is; parameters on the meta device
            stand for those that another rank holds.

    Raises `UsageError` where the net's control flow depends on numbers, which names the module.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        sizes = iter(shapes)
        device = device or next((p.device for p in net.parameters()), torch.device("cpu"))
        stand_ins = map_tensors(
            lambda t: torch.empty(next(sizes), dtype=t.dtype, device=device), inputs
        )
        state = {
            name: _fake(fake, tensor, device).requires_grad_(tensor.requires_grad)
            for name, tensor in (*net.named_parameters(), *net.named_buffers())
        }
        recorder = _Recorder(state, leaves(stand_ins))
        with recorder.modules(net), torch.enable_grad():
            with recorder:
                returned = recorder.run(lambda tree: call(_with_state(net, state), tree), stand_ins)
            recorder.check_outputs(returned)
    outputs = map_tensors(recorder.ref, returned)  # pyright: ignore[reportArgumentType]
    return recorder.tape(outputs)


def _fake(fake: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return fake.from_tensor(tensor)


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

        if kwargs.get("out") is not None or asks_in_place(func, args, kwargs):
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
