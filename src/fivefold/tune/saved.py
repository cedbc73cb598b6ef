"""How many bytes a program holds while it trains, estimated from its list of calls.

Autograd saves an operation's inputs, its results, or nothing; what several operations save counts once, views
and in-place results with what they are made of:

    step        v1 = conv(v0)   v2 = batch_norm(v1)   v3 = relu_(v2)   v4 = conv(v3)
    saves       v0              v1                    v2 (= v3)        -

In backward, what a step saved goes when its gradient is done; gradients of a value are there from its last
reader to its maker. See `fivefold.parallel.program.memory` for the same by the byte, a thousand times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fivefold.parallel.graph.names import is_in_place
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.program import Compute, Move, Program, exchange_of
from fivefold.parallel.program.rule import Here

__all__ = ["VIEWS", "HeldBytes", "changed_in_place", "held_bytes", "sizes_of"]

VIEWS = {
    "flatten", "view", "reshape", "permute", "transpose", "__getitem__", "unsqueeze", "squeeze", "chunk",
    "split", "T", "detach", "expand", "unbind", "narrow",
}  # fmt: skip
"""operations whose results lie in the memory of their operand, and cost nothing"""
_NOTHING = {
    "add", "sub", "neg", "cat", "stack", "interpolate", "upsample", "pad", "pixel_shuffle", "mean", "sum",
    "pixel_unshuffle", "channel_shuffle",
}  # fmt: skip
_RESULT = {"relu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "softplus"}
_COPY = {"hardtanh", "relu6", "hardswish", "hardsigmoid", "silu", "mish", "threshold"}
"""operations that save a copy of what they change in place"""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes by step of a program."""

    roots: Sequence[tuple[int, ...]]
    """values whose memory a step saves"""
    sizes: Mapping[int, int]
    """bytes of every value"""
    beside: np.ndarray
    """what else a step saves: masks, what was received of neighbours"""
    received: np.ndarray
    """the latter alone, which is kept even where a step is computed again"""
    passing: np.ndarray
    """gradients that are alive while the step is differentiated"""
    aliases: Mapping[int, int]
    """values that lie in another one's memory, and whose that is"""

    def saved(self, span: range) -> np.ndarray:
        """What each of some steps is the first of them to save."""
        known: set[int] = set()
        found = self.beside[span.start : span.stop].copy()
        for number, step in enumerate(span):
            new = set(self.roots[step]) - known
            found[number] += sum(self.sizes[index] for index in new)
            known |= new
        return found

    def unsaved_bytes(self, span: range, values: Iterable[int]) -> float:
        """Of those values that none of some steps saves."""
        saved = {index for step in span for index in self.roots[step]}
        own = {self.aliases.get(index, index) for index in values}
        return float(sum(self.sizes[index] for index in own - saved))

    def peak_bytes(self, span: range, made: np.ndarray | None = None) -> float:
        """The most that is alive while these steps are differentiated, the last one first.

        `made` are bytes that come with each step and stay: gradients of parameters.
        """
        alive = np.cumsum(self.saved(span)) + self.passing[span.start : span.stop]
        if made is not None:
            alive += np.cumsum(made[span.start : span.stop][::-1])[::-1]
        return float(alive.max(initial=0.0))


def sizes_of(program: Program, here: Here) -> dict[int, int]:
    """Bytes of every value on `here.rank`; what was exchanged is a value of its own."""
    tape = program.tape
    found: dict[int, int] = {}
    for index, spread in program.spreads.items():
        elements = math.prod(spread.local_shape(here.grid, here.rank))
        found[index] = elements * tape.dtypes[index].itemsize
    for step in program.steps:
        if isinstance(step, Move):
            each = tape.element_bytes(step.source)
            found[step.target] = math.prod(step.exchange.result) * each
    return found


def held_bytes(program: Program, here: Here) -> HeldBytes:
    """What every step of `here.rank` saves, and the gradients beside it."""
    sizes, count = sizes_of(program, here), len(program.steps)
    received = np.array([_strips(program, step) for step in program.steps])
    beside = received.copy()
    saved: list[tuple[int, ...]] = []
    roots: dict[int, int] = {}
    made: dict[int, int] = {}

    def root(index: int) -> int:
        return roots.get(index, index)

    for number, step in enumerate(program.steps):
        if isinstance(step, Move):
            made[step.target] = number
            if isinstance(step.source, Value) and _mostly_own(step):
                roots[step.target] = root(step.source.index)
            saved.append(())
            continue
        made |= dict.fromkeys(step.node.outputs, number)
        read = [ref.index for ref in step.operands if isinstance(ref, Value)]
        if read and (step.node.name in VIEWS or changed_in_place(step.node)):
            roots |= dict.fromkeys(step.node.outputs, root(read[0]))
        saved.append(tuple(root(index) for index in _kept(step.node, read)))
        beside[number] += _beside(step.node, sizes)
    return HeldBytes(saved, sizes, beside, received, _passing(program, sizes, made, count), roots)


def _passing(
    program: Program, sizes: Mapping[int, int], made: dict[int, int], count: int
) -> np.ndarray:
    change = np.zeros(count + 1)
    for index, number in made.items():
        last = program.last_use.get(index, number)
        change[number] += sizes[index]
        change[last + 1] -= sizes[index]
    passing = np.cumsum(change)[:count]
    for number, step in enumerate(program.steps):
        if isinstance(step, Compute) and step.border is not None:
            # The gradient comes in parts, of the interior and of strips: two of them and their sum.
            parts = zip(step.operands[1:], step.node.shapes[1:], strict=True)
            each = (program.tape.element_bytes(ref) * math.prod(shape) for ref, shape in parts)
            passing[number] += 2 * sum(each)
    return passing


def changed_in_place(node: Node) -> bool:
    """Whether the result is the first operand, changed."""
    if isinstance(node.function, nn.Module):
        return False
    return bool(node.kwargs.get("inplace")) or is_in_place(node.function)


def _kept(node: Node, read: Sequence[int]) -> Sequence[int]:
    if not node.grad or node.name in VIEWS | _NOTHING:
        return ()
    if node.name in _RESULT:
        return node.outputs
    if node.name in {"mul", "div"} and len(node.operands) == 1:
        return ()  # by a number
    return read if node.name in {"mul", "div", "matmul", "bmm"} else read[:1]


def _beside(node: Node, sizes: dict[int, int]) -> float:
    """Indices of maxima, masks, copies."""
    if node.name in _COPY and changed_in_place(node):
        return sizes[node.outputs[0]]
    if node.name.startswith(("max_pool", "adaptive_max_pool")):
        return 8 * sizes[node.outputs[0]] / node.output_bytes
    return sizes[node.outputs[0]] / node.output_bytes if node.name.startswith("dropout") else 0.0


def _mostly_own(step: Move) -> bool:
    """Whether an exchange adds a margin to what the rank has, which is remade in backward."""
    own = sum(math.prod(s.stop - s.start for s in place) for _, place in step.exchange.own)
    return 2 * own > math.prod(step.exchange.result)


def _strips(program: Program, step: Move | Compute) -> float:
    """What was received of neighbours is kept."""
    moved = exchange_of(step)
    if moved is None:
        return 0.0
    source, exchange = moved
    if isinstance(step, Move) and not _mostly_own(step):
        return 0.0  # counted as a value, by whoever saves it
    elements = sum(
        math.prod(s.stop - s.start for s in piece)
        for _, pieces in exchange.receives
        for piece in pieces
    )
    return float(elements * program.tape.element_bytes(source))
