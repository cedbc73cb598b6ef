"""What a step of a program holds for backward, and how long its nodes take: what a choice is made from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.memory.choice import Key
from fivefold.parallel.memory.slots import Slot, SlotWatch
from fivefold.parallel.program.program import Compute, Move, Program
from fivefold.parallel.program.rule import Here
from fivefold.parallel.program.weightless import current_count

__all__ = ["Held", "Item", "NodeBytes", "Profile", "profile_of"]

HEAVY = (
    "conv", "linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "bilinear",
    "scaled_dot_product_attention", "multi_head_attention_forward",
)  # fmt: skip
"""names that begin so: operations that wait for the processor, and save operands before they compute"""


@dataclass
class Item:
    """A memory that backward may need."""

    key: Key
    size_bytes: int
    made: int
    """number of the node that makes it"""
    saved: set[int] = field(default_factory=set[int])
    """by which nodes"""
    read: set[int] = field(default_factory=set[int])
    names: set[Key] = field(default_factory=set[Key])
    """of values in it: what a span that is computed again gives is known by its value alone"""
    passed: set[int] = field(default_factory=set[int])
    """those of `read` that hand it on as another value: views, and changes in place"""
    changed: int = -1
    """the last node that changes it in place"""
    copies: int = 1
    """how many there are at once, of as many micro-batches"""


@dataclass
class NodeBytes:
    """What one node takes beside what is held for backward."""

    forward: int = 0
    """the most while it is computed"""
    backward: int = 0
    """the most in its backward"""
    gradients: int = 0
    """as its backward begins"""


class Held(SlotWatch):
    """Of steps that keep everything: what is held, and what nodes take beside it.

    forward     f1      f2      f3      loss
    count       ├──────┤├──────┤├───────────
    backward            b2             b3          what was held is what of `items` is alive
    """

    def __init__(self) -> None:
        super().__init__(current_count)
        self.items: dict[Key, Item] = {}
        self.memory_of: dict[int, Key] = {}
        """by value: views, and what is changed in place, share one"""
        self.nodes: dict[int, NodeBytes] = {}
        self.computed: set[int] = set()
        self._alive = Counter[int]()
        """by storage: how often it is held"""
        self._copies = Counter[Key]()
        self._bytes = self._held = 0
        """what is held, and what was as the node began that is under way"""
        self._before: int | None = None
        """bytes as the step began"""

    def computes(self, node: int) -> None:
        """See `Watch`."""
        self.computed.add(node)
        super().computes(node)

    def began(self, slot: Slot, now: int) -> None:
        """See `SlotWatch`."""
        self._before = now if self._before is None else self._before
        self._held = self._bytes
        if slot[1]:
            found = self.nodes.setdefault(slot[0], NodeBytes())
            found.gradients = max(found.gradients, now - self._before - self._bytes)

    def ended(self, slot: Slot, most: int, now: int, following: int) -> None:  # noqa: ARG002
        """See `SlotWatch`."""
        assert self._before is not None
        found, own = self.nodes.setdefault(slot[0], NodeBytes()), most - self._before - self._held
        if slot[1]:
            found.backward = max(found.backward, own)
        else:
            found.forward = max(found.forward, own)

    def makes(self, index: int, key: Key) -> None:
        """See `Watch`."""
        self.memory_of[index] = key

    def holds(self, key: Key, storage: int, size_bytes: int, node: int) -> None:
        """See `Watch`."""
        found = self.items.setdefault(key, Item(key, size_bytes, node))
        found.size_bytes = max(found.size_bytes, size_bytes)
        found.saved.add(node)
        self._alive[storage] += 1
        if self._alive[storage] == 1:
            self._bytes += size_bytes
            self._copies[key] += 1
            found.copies = max(found.copies, self._copies[key])

    def lets_go(self, key: Key, storage: int, size_bytes: int) -> None:
        """See `Watch`."""
        self._alive[storage] -= 1
        if not self._alive[storage]:
            self._bytes -= size_bytes
            self._copies[key] -= 1


@dataclass(frozen=True)
class Profile:
    """Of one program on one rank."""

    names: tuple[str, ...]
    """of nodes"""
    items: tuple[Item, ...]
    seconds: tuple[float, ...]
    """of nodes, forward"""
    backward_s: tuple[float, ...]
    """of nodes"""
    nodes: tuple[NodeBytes, ...]
    where: tuple[str, ...] = ()
    """of nodes: module and name"""
    span_s: float = 0.0
    """of what is computed again at once, beside its nodes"""

    def timed(self, seconds: Sequence[float], backward_s: Sequence[float]) -> Profile:
        """With measured seconds of nodes."""
        return replace(self, seconds=tuple(seconds), backward_s=tuple(backward_s))

    def with_workspaces(self, workspaces: Mapping[Slot, int]) -> Profile:
        """With bytes that nodes, or their backward if True, take beside their tensors."""
        nodes = tuple(
            replace(
                node,
                forward=node.forward + workspaces.get((n, False), 0),
                backward=node.backward + workspaces.get((n, True), 0),
            )
            for n, node in enumerate(self.nodes)
        )
        return replace(self, nodes=nodes)

    def heavy(self, node: int) -> bool:
        """Whether computing it again is spared where it is the last of a span."""
        return self.names[node].startswith(HEAVY)


def profile_of(program: Program, here: Here, held: Held, seconds: Sequence[float]) -> Profile:
    """From what a step that keeps everything was seen to hold; nodes of other stages take nothing."""
    made, read, sizes = _values(program, here)
    copies = max((item.copies for item in held.items.values()), default=1)
    items = dict(held.items)
    makers: dict[Key, set[int]] = {}
    for index, node in made.items():
        if (key := held.memory_of.get(index)) is not None:
            item = items.setdefault(key, Item(key, sizes.get(index, 0), node, copies=copies))
            item.read |= read.get(index, set())
            item.names.add(("value", index, 0))
            makers.setdefault(key, set()).add(node)
    for key, nodes in makers.items():
        items[key].made = min(nodes)
        items[key].passed = nodes - {min(nodes)}
    for number, step in enumerate(program.steps):
        if isinstance(step, Compute) and step.in_place:
            key = held.memory_of.get(step.node.outputs[0])
            if key in items:
                items[key].changed = max(items[key].changed, program.node_numbers[number])
    nodes = program.tape.nodes
    found = sorted((i for i in items.values() if i.saved or i.read), key=lambda i: (i.made, i.key))
    own_s = [s if n in held.computed else 0.0 for n, s in enumerate(seconds)]
    return Profile(
        tuple(node.name for node in nodes),
        tuple(found),
        tuple(own_s),
        tuple(2 * s for s in own_s),
        tuple(held.nodes.get(n, NodeBytes()) for n in range(len(nodes))),
        tuple(f"{node.scope}.{node.name}".lstrip(".") for node in nodes),
    )


def _values(
    program: Program, here: Here
) -> tuple[Mapping[int, int], Mapping[int, set[int]], Mapping[int, int]]:
    """Of values: the node that makes each, the nodes that read it, and its bytes on this rank."""
    numbers, made, read = program.node_numbers, dict[int, int](), dict[int, set[int]]()
    sizes: dict[int, int] = {}
    for index, spread in program.spreads.items():
        each = program.tape.element_bytes(Value(index))
        sizes[index] = each * math.prod(spread.local_shape(here.grid, here.rank))
    for number, step in enumerate(program.steps):
        node = numbers[number]
        if isinstance(step, Move):
            refs, outputs = (step.source,), (step.target,)
            each = program.tape.element_bytes(step.source)
            sizes[step.target] = math.prod(step.exchange.result) * each
        else:
            refs, outputs = step.operands, step.node.outputs
        for ref in refs:
            if isinstance(ref, Value):
                read.setdefault(ref.index, set()).add(node)
        made |= dict.fromkeys(outputs, node)
    return made, read, sizes
