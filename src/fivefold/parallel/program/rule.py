"""What an operation has to tell, so that it can be computed in tiles.

    place   given how its operands lie, how its results lie: follows from the bounds of the parts
    lower   given what each rank shall hold of the results, what it wants of the operands for that, and
            how it computes the one from the other

A rule that answers None to `place` cannot work on parts: its operands are gathered. Rules are found by the
name of the function; see `names`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.graph.marked import is_pointwise
from fivefold.parallel.graph.names import plain
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.program.border import Border
from fivefold.parallel.program.exchange import Exchange, Lines, Want
from fivefold.parallel.program.spread import Division, Grid, Spread

__all__ = [
    "MARKED",
    "Here",
    "Local",
    "Moment",
    "Operation",
    "Piece",
    "Rule",
    "Statistics",
    "Wants",
    "as_held",
    "call",
    "everything",
    "plain",
    "registered",
    "rule",
    "rule_of",
    "want_of",
]

Wants = tuple[Want, ...]
"""what is wanted of a tensor, one entry per dim"""


@dataclass(frozen=True)
class Here:
    """Whose plan is made."""

    grid: Grid
    rank: int
    rows: int = 0
    """samples of the batch that the grid computes"""
    fewest: int = 0
    """samples of the smallest replica: with as many as tile ranks, tiles may be turned into samples"""
    cut: Division | None = None
    """how samples are divided among replicas, if the grid has all of them"""
    alike: frozenset[int] = frozenset()
    """values that have as many rows as there are samples, but would have them with fewer as well"""

    def fresh(self, node: Node) -> Spread:
        """How a new tensor lies that is the same everywhere: by samples, if it has as many rows."""
        made = Spread.whole(node.output_shapes[0])
        by_samples = self.cut is not None and not self.cut.empty and made.shape[:1] == (self.rows,)
        by_samples = by_samples and node.outputs[0] not in self.alike
        return made.with_cut(0, self.cut) if by_samples else made


@dataclass(frozen=True)
class Statistics:
    """What one batch gives to the running statistics of a norm, to be applied later."""

    running_mean: Tensor
    running_var: Tensor
    batches: Tensor | None
    """the norm's count of batches"""
    momentum: float | None
    """None: the mean over all batches"""
    mean: Tensor
    var: Tensor

    @torch.no_grad()
    def apply(self) -> None:
        """Update the running statistics."""
        momentum = self.momentum
        if self.batches is not None:
            self.batches.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.batches)
        self.running_mean.lerp_(self.mean, momentum or 0.0)
        self.running_var.lerp_(self.var, momentum or 0.0)


@dataclass(frozen=True)
class Piece:
    """Samples of a batch that follow each other in the global batch as well."""

    start: int
    stop: int
    origin: int
    """number of the first one in the global batch"""


@dataclass
class Moment:
    """What a run of a plan needs besides tensors."""

    groups: Callable[[tuple[int, ...], bool], dist.ProcessGroup]
    """the ranks along axes of the grid, those of all replicas too if the flag is set; this rank's line"""
    lines: Lines
    """the groups in which ranks exchange"""
    rows: int
    """samples of the batch that the grid computes; 0 means that it is a stand-in"""
    total: int
    """samples of the global batch"""
    pieces: tuple[Piece, ...]
    """where its samples stand in the global batch"""
    joint: bool
    """whether batch norm joins the replicas"""
    key: Callable[[str, int], int] | None
    """from a module and the number of its random call: the key of the mask; None leaves masks to torch"""
    recompute: int | str = 0
    """which activations are computed again in backward, see `recompute.segments`"""
    budget: Budgeted | None = None
    """what is kept, computed again or spilled instead, under a budget"""
    compiles: bool = False
    """whether nodes that follow each other are compiled as one graph"""
    here: Here | None = None
    note: Callable[[Statistics], None] | None = None
    """takes what running statistics are due, which then stay as they are; None: they are updated at once"""
    updates: bool = True
    """whether running statistics are updated at all; not where something is computed again"""

    def statistics(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """Who joins the statistics over the batch of what is divided along `axes`."""
        grid = None if self.here is None else self.here.grid
        if grid is None or grid.data is None:
            return self.groups(axes, self.joint)
        return self.groups(tuple(a for a in axes if self.joint or a != grid.data), False)


@dataclass(frozen=True)
class Local:
    """How this rank computes its part of an operation."""

    wants: tuple[Wants, ...]
    """of each operand"""
    run: Callable[[Moment, Sequence[Tensor]], Any]
    """from what was wanted to what the operation returns"""
    fills: tuple[float, ...] = field(default=())
    """of each operand: what lies outside the tensor; zero where the tuple ends"""
    collective: str | None = None
    """what the ranks exchange while it runs, if they do: counted in the plan's table"""
    bordered: Callable[[Exchange], Border | None] | None = None
    """how it computes the first operand's own part and what an exchange brings apart, if it can"""
    in_place: bool = False
    """whether the net's own call, which changes its first operand, does the same as `run`"""
    differs_apart: bool = False
    """whether replicas that ran the net as it is would compute something else, though nothing is exchanged"""
    tight: bool = False
    """whether it gives what ranks own and no margin, which its readers then exchange"""


@dataclass(frozen=True)
class Operation:
    """A node, and how its tensors lie."""

    node: Node
    given: tuple[Spread, ...]
    """how the operands lie"""
    here: Here
    made: tuple[Spread, ...] = ()
    """what ranks shall hold of the results; empty while that is being decided"""

    def whole(self, first: int = 0) -> tuple[Wants, ...]:
        """To want the operands from number `first` on whole: weights, say."""
        return tuple(everything(shape) for shape in self.node.shapes[first:])


class Rule(Protocol):
    """See the module."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """How the results lie, without margins; None if this needs its operands whole."""
        ...

    def lower(self, op: Operation) -> Local:
        """How to compute what `op.made` says that ranks hold."""
        ...


MARKED = "ff.pointwise"
"""name of the rule for autograd functions that are marked so"""
_RULES: dict[str, Rule] = {}
_FAMILIES = "fivefold.parallel.tiles"
"""the package that registers them all; by name, since it lies above this one"""


_R = TypeVar("_R", bound=Rule)


def rule(*names: str) -> Callable[[type[_R]], type[_R]]:
    """Register a rule for functions of these names."""

    def register(kind: type[_R]) -> type[_R]:
        instance = kind()
        for name in names:
            assert name not in _RULES, name
            _RULES[name] = instance
        return kind

    return register


def rule_of(node: Node) -> Rule | None:
    """The rule for what `node` calls, if there is one."""
    marked = is_pointwise(node.function) and len(node.outputs) == 1
    return _registered().get(MARKED if marked else node.name)


def registered() -> dict[type[Rule], list[str]]:
    """Every kind of rule with the names of its functions; what it does to tiles is told by its docstring."""
    kinds: dict[type[Rule], list[str]] = {}
    for name, instance in sorted(_registered().items()):
        kinds.setdefault(type(instance), []).append(name)
    return kinds


def _registered() -> dict[str, Rule]:
    import_module(_FAMILIES)  # waits for another thread that is about it
    return _RULES


# ---- for rules


def as_held(spread: Spread) -> Wants:
    """To want of a tensor what ranks hold of another that is spread so."""
    return tuple(
        Want.all_of(n) if cut is None else Want.ranges(cut.axes, cut.held)
        for n, cut in zip(spread.shape, spread.cuts, strict=True)
    )


def everything(shape: Sequence[int]) -> Wants:
    """To want a tensor whole."""
    return tuple(map(Want.all_of, shape))


def want_of(n: int, cut: Division | None) -> Want:
    """To want of a dim what ranks hold of another one that is cut so."""
    return Want.all_of(n) if cut is None else Want.ranges(cut.axes, cut.held)


def call(node: Node) -> Callable[[Moment, Sequence[Tensor]], Any]:
    """To call on parts what the net calls on the whole."""
    function = plain(node.function)

    def run(_moment: Moment, operands: Sequence[Tensor]) -> Any:
        args, kwargs = node.arguments(operands)
        return function(*args, **kwargs)

    return run
