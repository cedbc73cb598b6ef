"""Numbers that a forward takes out of tensors, by `.item()`, `bool()`, `tolist()` and the like.

Those of parameters, buffers and constants alone are known: a flag that a layer is initialised, a count of
steps. They are looked up, and the guards look again before every step. Those that depend on the inputs are
not known. An assert that looks at one is taken to hold, and checked at every run; nothing else may.

    assert x.abs().max().item() < 1e4, "diverged"        recorded as a check
    if x.mean() > 0: ...                                 refused
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel.graph.names import plain
from fivefold.parallel.graph.refs import Ref, StateRef, Value
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.graph.writes import user_frame
from fivefold.torch_private import pytree, without_modes

__all__ = ["Check", "Unknown", "assumed", "known"]

_RANDOM = frozenset({
    "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "normal",
    "multinomial", "poisson", "binomial", "uniform", "random", "exponential", "dropout", "gumbel_softmax",
    "log_normal", "cauchy", "geometric", "rrelu", "empty", "empty_like", "new_empty",
})  # fmt: skip


class Check:
    """An assert of the user's: raises where what it looks at is not as it was taken to be."""

    def __init__(self, holds: Callable[..., Any], wanted: bool, where: str) -> None:
        self.holds, self.wanted, self.where = holds, wanted, where

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Look at the tensors."""
        if bool(self.holds(*tensors)) != self.wanted:
            raise AssertionError(f"the assert in {self.where} does not hold")
        return ()


class Unknown:
    """A number that tensors will give. Arithmetic and comparisons give others; only an assert may look."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        compute: Callable[..., Any],
        check: Callable[[Unknown], bool],
        refuse: Callable[[], Any],
    ) -> None:
        self.tensors, self.compute = list(tensors), compute
        self._check, self._refuse = check, refuse

    def combined(self, function: Callable[[Any, Any], Any], other: Any) -> Unknown:
        """What a function gives of this number and another, which is not known either."""
        if isinstance(other, Tensor):
            self._refuse()
        mine, count = self.compute, len(self.tensors)
        if isinstance(other, Unknown):
            theirs = other.compute
            tensors = [*self.tensors, *other.tensors]
            return self._made(tensors, lambda *x: function(mine(*x[:count]), theirs(*x[count:])))
        return self._made(self.tensors, lambda *x: function(mine(*x), other))

    def _made(self, tensors: Sequence[Tensor], compute: Callable[..., Any]) -> Unknown:
        return Unknown(tensors, compute, self._check, self._refuse)

    def __bool__(self) -> bool:
        return self._check(self)

    def __abs__(self) -> Unknown:
        mine = self.compute
        return self._made(self.tensors, lambda *x: abs(mine(*x)))

    def __neg__(self) -> Unknown:
        mine = self.compute
        return self._made(self.tensors, lambda *x: -mine(*x))

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    def __float__(self) -> float:
        return self._refuse()

    def __int__(self) -> int:
        return self._refuse()

    def __index__(self) -> int:
        return self._refuse()

    def __hash__(self) -> int:
        return self._refuse()

    def __str__(self) -> str:
        return self._refuse()

    def __format__(self, spec: str) -> str:
        return self._refuse()


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Unknown, Any], Unknown]:
    return lambda self, other: self.combined(function, other)


def _reversed(function: Callable[[Any, Any], Any]) -> Callable[[Unknown, Any], Unknown]:
    return lambda self, other: self.combined(lambda a, b: function(b, a), other)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Unknown, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(Unknown, f"__r{_name}__", _reversed(getattr(operator, _name)))


def assumed() -> tuple[bool, str] | None:
    """What the assert that is running takes for true, and where it is; None if none is running."""
    frame = user_frame()
    if frame is None:
        return None
    place = _place(frame)
    if place is None:
        return None
    wanted = _wanted(frame.f_code.co_filename, place)
    return None if wanted is None else (wanted, f"{Path(frame.f_code.co_filename).name}:{place[0]}")


def _place(frame: FrameType) -> tuple[int, int] | None:
    """Line and column of what a frame is doing."""
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2]
    return None if line is None or column is None else (line, column)


def _wanted(file: str, place: tuple[int, int]) -> bool | None:
    """What an expression has to be for the assert around it to hold; None outside of asserts."""
    for node in _asserts(file):
        if _covers(node.test, place):
            wanted, inner = True, node.test
            while True:
                if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
                    wanted, inner = not wanted, inner.operand
                elif isinstance(inner, ast.BoolOp):
                    inner = next((v for v in inner.values if _covers(v, place)), inner.values[0])
                else:
                    return wanted
    return None


@functools.lru_cache(64)
def _asserts(file: str) -> tuple[ast.Assert, ...]:
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Assert))


def _covers(node: ast.expr, place: tuple[int, int]) -> bool:
    first = (node.lineno, node.col_offset)
    last = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return first <= place <= last


def known(
    ref: Ref, nodes: Sequence[Node], look: Callable[[str], Tensor], untold: set[str]
) -> Callable[[], Tensor] | None:
    """How to compute a value from what the net holds alone; None where inputs or random numbers take part.

    `look` gives a parameter or buffer by its name; those in `untold` are changed by what is between.
    """
    makers = {index: node for node in nodes for index in node.outputs}
    needed: dict[int, Node] = {}
    todo: list[Ref] = [ref]
    while todo:
        one = todo.pop()
        if isinstance(one, StateRef) and (one.name in untold or look(one.name).is_meta):
            return None
        if isinstance(one, Value) and one.index not in needed:
            node = makers.get(one.index)
            if node is None or node.name in _RANDOM or isinstance(node.function, torch.nn.Module):
                return None
            needed |= dict.fromkeys(node.outputs, node)
            todo.extend(node.operands)
    order = [node for node in nodes if any(index in needed for index in node.outputs)]

    def compute() -> Tensor:
        values: dict[int, Tensor] = {}

        def get(one: Ref) -> Tensor:
            if isinstance(one, Value):
                return values[one.index]
            return look(one.name) if isinstance(one, StateRef) else one.tensor

        with without_modes(), torch.no_grad():
            for node in order:
                args, kwargs = node.arguments([get(one) for one in node.operands])
                result = plain(node.function)(*args, **kwargs)
                made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
                values.update(zip(node.outputs, made, strict=True))
            return get(ref)

    return compute
