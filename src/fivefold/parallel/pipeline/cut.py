"""Where a recorded net is cut into stages.

    nodes    conv bn relu | conv bn add relu | ... | pool fc        three bounds, four stages

Stages are runs of nodes of about equal time, the time of what they send included. What a forward changes
and uses on both sides of a bound, a buffer say, keeps its nodes in one stage; a tied weight is on all that
use it, and its gradients are summed over them. The bounds are remembered by the calls that begin a stage, so
that other shapes of input, which are recorded anew, are cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import nn

from fivefold.errors import PlanError, UsageError, suggest
from fivefold.parallel.graph.refs import StateRef, Value, refs_of
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.program.costs import Costs

__all__ = ["MEASURED", "Cut", "balanced", "changed_by", "named", "states_of", "uses_of"]

MEASURED = "measured"
"""`pipeline.cut` that asks for stages of about equal measured time"""

_BEHIND = 8
_Call = tuple[str, str, int]
"""module, operation, and how many calls of it came before"""


@dataclass(frozen=True)
class Cut:
    """The calls that begin the second stage, the third, and so on."""

    begins: tuple[_Call, ...]
    behind: tuple[tuple[_Call, ...], ...]
    """the calls that follow each of them: a norm that counts its batches does so in training only"""

    @classmethod
    def before(cls, nodes: Sequence[Node], starts: Sequence[int]) -> Cut:
        """A cut in front of these nodes."""
        calls = [_call(node) for node in nodes]
        behind = [calls[n + 1 : end][:_BEHIND] for n, end in pairwise((*starts, len(calls)))]
        return cls(tuple(calls[n] for n in starts), tuple(map(tuple, behind)))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.begins) + 1

    def bounds(self, tape: Tape) -> list[int]:
        """First node of every stage of `tape`, and the number of nodes at the end.

        Raises `UsageError` where the net takes another way for this shape of input.
        """
        where = {_call(node): number for number, node in enumerate(tape.nodes)}
        found = [
            next((where[call] for call in (begin, *behind) if call in where), None)
            for begin, behind in zip(self.begins, self.behind, strict=True)
        ]
        if None in found or found != sorted(n for n in found if n is not None):
            raise UsageError(
                "for this shape of input the net calls its layers in another way than for the example that "
                "its stages were made for: give `example` the shapes that are trained"
            )
        return [0, *(n for n in found if n is not None), len(tape.nodes)]

    def __str__(self) -> str:
        return ", ".join(f"{name} in {scope or 'the net'}" for scope, name, _ in self.begins)


def balanced(
    tape: Tape,
    stages: int,
    costs: Costs | None = None,
    node_s: Sequence[float] | None = None,
    *,
    ties: bool = True,
) -> Cut:
    """Cut a net into stages such that the slowest is as fast as possible.

    `node_s` are seconds of the nodes, forward and backward, estimated by `costs` unless they were measured.
    With `ties`, several stages may hold the same parameter. Raises `PlanError` if there are too few places
    to cut.
    """
    costs = costs or Costs()
    if node_s is None:
        node_s = [3 * costs.forward_s(node) for node in tape.nodes]  # backward costs twice
    times = np.array(node_s)
    assert len(times) == len(tape.nodes), "one time per node"
    sent = 2 * _crossing_bytes(tape) / costs.bytes_per_s  # there and, as a gradient, back
    tied = _tied(tape, ties)
    free = [n for n in range(1, len(times)) if n not in tied]
    if len(free) < stages - 1:
        raise PlanError(
            f"the net can be cut at {len(free)} places, which gives at most {len(free) + 1} stages, not "
            f"{stages}{_because(tied)}: use pipe={len(free) + 1} or less, or fewer stages per rank"
        )
    return Cut.before(tape.nodes, _slowest_least(times, sent, free, stages))


def named(tape: Tape, modules: Sequence[str], stages: int, *, ties: bool = True) -> Cut:
    """Cut a net into stages in front of the first calls of some modules. Raises `PlanError`."""
    modules = [name.strip() for name in modules]
    if len(modules) != stages - 1:
        raise PlanError(
            f"pipeline.cut names {len(modules)} modules, but {stages} stages have {stages - 1} that begin "
            "one: the first stage begins with the net"
        )
    starts: list[int] = []
    scopes, tied = [node.scope for node in tape.nodes], _tied(tape, ties)
    for module in modules:
        inside = [n for n, scope in enumerate(scopes) if f"{scope}.".startswith(f"{module}.")]
        if not inside:
            raise PlanError(
                f"pipeline.cut names {module!r}, of which no call was seen{suggest(module, set(scopes))}"
            )
        if inside[0] in tied:
            raise PlanError(f"pipeline.cut: no stage can begin at {module!r}{_because(tied)}")
        if inside[0] == 0:
            raise PlanError(
                f"pipeline.cut: {module!r} begins the net; name what begins the other stages"
            )
        starts.append(inside[0])
    if starts != sorted(set(starts)):
        raise PlanError(f"pipeline.cut = {', '.join(modules)!r} is not in the order of the net")
    return Cut.before(tape.nodes, starts)


def states_of(node: Node) -> frozenset[str]:
    """Names of the parameters and buffers that a node uses."""
    names = {
        ref.name
        for ref in node.operands
        if isinstance(ref, StateRef)
        and not ref.name.startswith(".")  # all ranks have plain attributes
    }
    if isinstance(node.function, nn.Module):
        module = node.function
        tensors = (*module.named_parameters(), *module.named_buffers())
        names |= {f"{node.scope}.{name}" if node.scope else name for name, _ in tensors}
    return frozenset(names)


def changed_by(tape: Tape) -> frozenset[str]:
    """Names of what a forward changes: parameters, buffers, and, behind a dot, attributes."""
    names = {*tape.statistics, *(f".{found.path}" for _, found in tape.left_before)}
    names |= {target.name for target, _ in tape.effects.written if isinstance(target, StateRef)}
    names |= {one.path for one in tape.effects.sets if one.registered}
    for node in tape.nodes:
        if isinstance(node.function, nn.Module):  # a norm with its own statistics
            prefix = f"{node.scope}." if node.scope else ""
            names |= {prefix + name for name, _ in node.function.named_buffers()}
    return frozenset(names)


def uses_of(tape: Tape) -> list[frozenset[str]]:
    """By node: names of the parameters and buffers that it uses, or whose next numbers it makes."""
    makes: dict[int, set[str]] = {}
    for target, ref in tape.effects.written:
        if isinstance(target, StateRef) and isinstance(ref, Value):
            makes.setdefault(ref.index, set()).add(target.name)
    for one in tape.effects.sets:
        if one.registered:
            for ref in one.refs():
                if isinstance(ref, Value):
                    makes.setdefault(ref.index, set()).add(one.path)
    # What is left in an attribute is on the rank that reads it in the next forward.
    carried = {index: found.path for index, found in tape.left_before}
    for one in tape.effects.sets if carried else ():
        for ref in one.refs():
            if isinstance(ref, Value) and one.path in carried.values():
                makes.setdefault(ref.index, set()).add(f".{one.path}")
    none = frozenset[str]()
    return [
        states_of(node).union(
            *(makes.get(index, none) for index in node.outputs),
            (
                f".{carried[r.index]}"
                for r in node.operands
                if isinstance(r, Value) and r.index in carried
            ),
        )
        for node in tape.nodes
    ]


def _slowest_least(
    times: np.ndarray, sent: np.ndarray, free: Sequence[int], stages: int
) -> list[int]:
    """Bounds that make the slowest stage as fast as possible; a stage pays for what it receives.

    worst[s][j]: the slowest of s + 1 stages that end in front of place j.
    """
    places = np.array([0, *free, len(times)])
    until = np.concatenate([[0.0], np.cumsum(times)])[places]
    receives = sent[places]
    receives[0] = 0.0
    worst = until.copy()
    chosen: list[np.ndarray] = []
    for _ in range(1, stages):
        begin = np.full((len(places), len(places)), math.inf)
        for j in range(1, len(places)):
            begin[j, 1:j] = np.maximum(worst[1:j], until[j] - until[1:j] + receives[1:j])
        chosen.append(begin.argmin(axis=1))
        worst = begin.min(axis=1)
    bounds, at = [], len(places) - 1
    for choice in reversed(chosen):
        at = int(choice[at])
        bounds.append(int(places[at]))
    return bounds[::-1]


def _tied(tape: Tape, ties: bool) -> dict[int, str]:
    """Places where no stage may begin -> what is used on both sides, and cannot be on several stages."""
    first: dict[str, int] = {}
    found: dict[int, str] = {}
    changes = changed_by(tape)
    for number, names in enumerate(uses_of(tape)):
        for name in names if not ties else names & changes:
            begin = first.setdefault(name, number)
            found |= dict.fromkeys(range(begin + 1, number + 1), name)
    return found


def _because(tied: Mapping[int, str]) -> str:
    names = sorted(set(tied.values()))
    return f", since {', '.join(names[:3])} is used in several places" if names else ""


def _crossing_bytes(tape: Tape) -> np.ndarray:
    """Bytes of what crosses a bound in front of every node, and behind the last.

    That is what was made in front of it and is read behind it, or returned by the net.
    """
    made = dict.fromkeys(tape.inputs, -1)
    last: dict[int, int] = {}
    for number, node in enumerate(tape.nodes):
        made |= dict.fromkeys(node.outputs, number)
        last |= dict.fromkeys((r.index for r in node.operands if isinstance(r, Value)), number)
    last |= {r.index: len(tape.nodes) for r in refs_of(tape.outputs) if isinstance(r, Value)}
    change = np.zeros(len(tape.nodes) + 2)
    for value, number in last.items():
        size = math.prod(tape.shapes[value]) * tape.dtypes[value].itemsize
        change[made[value] + 1] += size
        change[number + 1] -= size
    return np.cumsum(change)[: len(tape.nodes) + 1]


def _call(node: Node) -> _Call:
    return (node.scope, node.name, node.call)
