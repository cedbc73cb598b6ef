"""A program of a rank, divided into the stages of a cut.

A stage takes what crosses the bound in front of it, carries out its steps, and gives what crosses the bound
behind it. What a later stage needs of an earlier one, a skip connection say, is handed on from stage to
stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.parallel.graph.containers import Found
from fivefold.parallel.graph.effects import Set
from fivefold.parallel.graph.hooks import Hooked
from fivefold.parallel.graph.refs import StateRef, Value
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.pipeline.cut import Cut, states_of, uses_of
from fivefold.parallel.program.program import Compute, Program
from fivefold.parallel.program.run import left, returned
from fivefold.parallel.program.spread import Grid

__all__ = [
    "Crossing",
    "Stage",
    "check_holders",
    "check_hooks",
    "check_set",
    "check_writers",
    "divided",
    "holders",
]


@dataclass(frozen=True)
class Crossing:
    """A value that one stage hands to the next, on this rank."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """whether its gradient travels back"""


@dataclass(frozen=True)
class Stage:
    """Some steps of a program."""

    span: range
    takes: tuple[Crossing, ...]
    gives: tuple[Crossing, ...]
    states: frozenset[str]
    """names of the parameters and buffers that it uses"""
    leaves: frozenset[int]
    """values that it makes and the net leaves in buffers and attributes"""
    carried: tuple[tuple[int, Found], ...] = ()
    """values that it reads and an earlier forward has left, and where"""
    attributes: frozenset[str] = frozenset()
    """where the attributes are that it reads"""

    def carried_now(self) -> dict[int, Tensor]:
        """What an earlier forward has left for it."""
        return {index: found.now() for index, found in self.carried}


def divided(
    program: Program, cut: Cut, held_by: Mapping[str, tuple[int, ...]], grid: Grid, rank: int
) -> list[Stage]:
    """The stages of tile rank `rank`; `held_by` as `holders` says. Raises `UsageError`, see `Cut.bounds`."""
    tape = program.tape
    bounds = _moved(cut.bounds(tape), tape, held_by)
    done = {step.node: n for n, step in enumerate(program.steps) if isinstance(step, Compute)}
    # A stage may have nothing to do: in evaluation, say, where its layers pass on what they get.
    steps = [done[tape.nodes[bound - 1]] + 1 if bound else 0 for bound in bounds]
    values = _values(program, grid, rank)
    at = [[v for v, made, last in values if made < step <= last] for step in steps]
    uses, behind = uses_of(tape), left(program)
    found: list[Stage] = []
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        makes = {index for node in tape.nodes[first:stop] for index in node.outputs}
        makes |= {*tape.given} if stage == 0 else set()
        reads = {
            ref.index
            for node in tape.nodes[first:stop]
            for ref in node.operands
            if isinstance(ref, Value)
        }
        carried = tuple((index, place) for index, place in tape.left_before if index in reads)
        plain = (
            tape.places[ref.name].path
            for node in tape.nodes[first:stop]
            for ref in node.operands
            if isinstance(ref, StateRef) and ref.name.startswith(".")
        )
        found.append(
            Stage(
                range(*steps[stage : stage + 2]),
                tuple(at[stage]),
                tuple(at[stage + 1]),
                frozenset(itertools.chain.from_iterable(uses[first:stop])),
                frozenset(behind & makes),
                carried,
                frozenset(itertools.chain(plain, (place.path for _, place in carried))),
            )
        )
    return found


def _moved(bounds: list[int], tape: Tape, held_by: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Bounds of another tape than the one that was cut, moved to where each stage uses what it holds.

    In evaluation, say, a module reads the buffers that it only writes in training, by other calls. Where that
    cannot be, a bound stays, and `check_holders` tells of it.
    """
    uses = [[held_by[name] for name in names if name in held_by] for names in uses_of(tape)]
    found = [0]
    for stage, bound in enumerate(bounds[1:-1], start=1):
        before = [n for n, each in enumerate(uses) if any(max(held) < stage for held in each)]
        behind = [n for n, each in enumerate(uses) if any(min(held) >= stage for held in each)]
        least = max((n + 1 for n in before), default=0)
        most = min(behind, default=len(uses))
        fits = found[-1] <= least <= most
        found.append(min(max(bound, least), most) if fits else bound)
    return [*found, bounds[-1]]


def _values(program: Program, grid: Grid, rank: int) -> list[tuple[Crossing, int, int]]:
    """Every value, the step that makes it (-1 for inputs), and the last that reads it.

    What was exchanged is a value of its own. What the net returns is read behind the last step.
    """
    tape, trained = program.tape, _trained(program)
    last = {**dict.fromkeys(left(program) & {*tape.given}, 0), **program.last_use}
    last |= dict.fromkeys(returned(program), len(program.steps))
    found: list[tuple[Crossing, int, int]] = []
    origin: dict[int, int] = {}  # of what was moved

    def add(index: int, shape: tuple[int, ...], like: int, made: int) -> None:
        if index in last:
            value = Crossing(index, shape, tape.dtypes[like], like in trained)
            found.append((value, made, last[index]))

    for index in tape.given:
        add(index, program.spreads[index].local_shape(grid, rank), index, -1)
    for number, step in enumerate(program.steps):
        if isinstance(step, Compute):
            for index in step.node.outputs:
                add(index, program.spreads[index].local_shape(grid, rank), index, number)
        elif isinstance(step.source, Value):
            origin[step.target] = origin.get(step.source.index, step.source.index)
            add(step.target, step.exchange.result, origin[step.target], number)
    return found


def holders(net: nn.Module, tape: Tape, cut: Cut) -> dict[str, tuple[int, ...]]:
    """Name of every parameter and buffer -> the stages that use it, in order; the first if none does.

    A tensor with several names has the same stages under all of them.
    """
    tensors = {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }
    found: dict[int, set[int]] = {}
    uses = uses_of(tape)
    for stage, (first, stop) in enumerate(itertools.pairwise(cut.bounds(tape))):
        for name in itertools.chain.from_iterable(uses[first:stop]):
            if name in tensors:
                found.setdefault(id(tensors[name]), set()).add(stage)
    return {name: tuple(sorted(found.get(id(tensor), {0}))) for name, tensor in tensors.items()}


def check_holders(stages: list[Stage], holders: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `UsageError` if some stage uses a parameter that only others hold."""
    for number, stage in enumerate(stages):
        strange = sorted(n for n in stage.states if number not in holders.get(n, (number,)))
        if strange:
            raise UsageError(
                f"for this shape of input, or with the net as it is now stage {number} uses "
                f"{', '.join(strange[:3])}, which stage {holders[strange[0]][0]} holds: give `example` the "
                "shapes that are trained, and parallelize the net in the state that it is trained in"
            )


def check_hooks(program: Program, stages: list[Stage]) -> None:
    """Raises `UsageError` for a module whose hooks on tensors would be called on several stages: what they
    count or keep is one process's.
    """
    first: dict[str, int] = {}
    for number, stage in enumerate(stages):
        steps = (program.steps[n] for n in stage.span)
        nodes = (step.node for step in steps if isinstance(step, Compute))
        for node in (node for node in nodes if isinstance(node.function, Hooked)):
            if first.setdefault(node.scope, number) != number:
                raise UsageError(
                    f"a hook that the forward registers on a tensor ({node.where}) would be called on "
                    "several stages, each of which sees its part: let pipeline.cut name the modules that "
                    "begin stages, such that the module is used in one"
                )


def check_set(one: Set) -> None:
    """Raise `UsageError` for a tensor that moves from one place of the net to another: no stage makes it."""
    refs = list(one.refs())
    if refs and not any(isinstance(ref, Value) for ref in refs):
        raise UsageError(
            f"the net moves a tensor that it has kept to {one.path!r}, which stages cannot follow: keep it "
            "where it is, in a buffer that is written in place, say"
        )


def check_writers(stages: list[Stage], writers: Mapping[str, int]) -> None:
    """Raises `UsageError` if some stage reads an attribute that the forward leaves on another one."""
    for number, stage in enumerate(stages):
        for path in sorted(stage.attributes):
            writer = next(
                (
                    w
                    for left, w in writers.items()
                    if path == left or path.startswith((f"{left}[", f"{left}."))
                ),
                number,
            )
            if writer != number:
                raise UsageError(
                    f"stage {number} of the pipeline reads {path!r}, which the net leaves on stage "
                    f"{writer}: no rank has both. Let pipeline.cut name the modules that begin stages, "
                    "such that both fall into one"
                )


def _trained(program: Program) -> set[int]:
    """Values through which a gradient may flow: what is returned depends on them, and they on a parameter,
    whether it is frozen or not.
    """
    tape, found = program.tape, set[int]()
    for node in tape.nodes:
        depends = bool(states_of(node)) or any(
            isinstance(ref, StateRef) or (isinstance(ref, Value) and ref.index in found)
            for ref in node.operands
        )
        if node.grad and depends:
            found |= {
                i
                for i in node.outputs
                if tape.dtypes[i].is_floating_point or tape.dtypes[i].is_complex
            }
    wanted = returned(program)
    for node in reversed(tape.nodes):
        if not (found & wanted).isdisjoint(node.outputs):
            wanted |= {ref.index for ref in node.operands if isinstance(ref, Value)}
    return found & wanted
