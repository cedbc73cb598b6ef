"""Carrying out a program on one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.parallel.graph.refs import Ref, StateRef, Value, refs_of
from fivefold.parallel.graph.tape import Autocast
from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.memory.saving import Saving
from fivefold.parallel.program.compiled import CompiledSpan, compiled_span
from fivefold.parallel.program.exchange import Kept, exchange
from fivefold.parallel.program.in_place import as_recorded
from fivefold.parallel.program.program import Compute, Move, Program
from fivefold.parallel.program.recompute import (
    StepSpan,
    divided,
    recomputed,
    segment_of,
    segments,
    spans_of,
)
from fivefold.parallel.program.rule import Moment
from fivefold.torch_private import memory_of, pytree

__all__ = ["Defer", "carry_out", "execute", "left", "returned", "run_steps"]


Defer = Callable[[Compute, Callable[[Sequence[Tensor]], Any], Sequence[Tensor]], Any]
"""how a step is computed, from what computes it and its operands: for those who want to add something"""


def execute(
    program: Program,
    inputs: Sequence[Tensor],
    state: Mapping[str, Tensor],
    moment: Moment,
) -> dict[int, Tensor]:
    """Run `program` on this rank's parts of the inputs; the values that its net returns and leaves behind,
    by number. Collective.
    """
    values = dict(zip(program.tape.inputs, inputs, strict=True))
    wanted = returned(program) | left(program)
    made = carry_out(program, values, range(len(program.steps)), wanted, state=state, moment=moment)
    return {index: made[index] for index in wanted}


def returned(program: Program) -> set[int]:
    """The values that the net returns."""
    return {ref.index for ref in refs_of(program.tape.outputs) if isinstance(ref, Value)}


def left(program: Program) -> set[int]:
    """The values that the net leaves in buffers and attributes."""
    return {ref.index for ref in program.tape.effects.refs() if isinstance(ref, Value)}


def carry_out(
    program: Program,
    values: dict[int, Tensor],
    span: range,
    keep: set[int],
    *,
    state: Mapping[str, Tensor],
    moment: Moment,
    defer: Defer | None = None,
) -> dict[int, Tensor]:
    """Carry out the steps of `span`, given the values that they read; what is in `keep` is returned.

    `defer` is not asked where activations are recomputed.
    """
    if torch.is_grad_enabled():
        if moment.budget is not None:
            return _carry_out_within(program, values, span, keep, state, moment, defer)
        if parts := segments(moment.recompute, len(span)):
            for segment in _divided(program, parts, keep, span, moment):
                values |= _recomputed(program, segment, values, state, moment)
            return values
        if moment.compiles and defer is None:
            device = next((t.device.type for t in values.values()), "cpu")
            compiled = compiled_span(program, span, keep, state, moment, device)
            running = _Running(program, values, state, moment, compiled=compiled)
            made = running.steps(span, keep, remake=True)
            compiled.finish()
            return made
    running = _Running(program, values, state, moment, defer)
    return running.steps(span, keep, remake=True)


def run_steps(  # noqa: PLR0917 - what `carry_out` is given
    program: Program,
    values: Mapping[int, Tensor],
    span: range,
    keep: set[int],
    state: Mapping[str, Tensor],
    moment: Moment,
) -> dict[int, Tensor]:
    """The same where nothing is chosen, compiled, or made again from strips."""
    return _Running(program, dict(values), state, moment).steps(span, keep, remake=False)


def _carry_out_within(  # noqa: PLR0917 - what `carry_out` was given
    program: Program,
    values: dict[int, Tensor],
    span: range,
    keep: set[int],
    state: Mapping[str, Tensor],
    moment: Moment,
    defer: Defer | None,
) -> dict[int, Tensor]:
    """The same under a budget: some spans are computed again, and of what is saved some is spilled."""
    assert moment.budget is not None
    saving = moment.budget.saving((*values.values(), *state.values()))
    with nullcontext() if saving is None else saving.hooks():
        for part, segment in _chosen(program, moment.budget.choice, keep, span):
            if segment is not None:
                if saving is not None:
                    saving.at(program.node_numbers[part.start])
                values |= _recomputed(program, segment, values, state, moment, saving)
                for index in segment.takes:
                    if program.last_use.get(index, -1) < part.stop and index not in keep:
                        values.pop(index, None)
            else:
                running = _Running(program, values, state, moment, defer, saving)
                values = running.steps(part, keep, remake=True)
    return values


def _recomputed(  # noqa: PLR0917 - likewise
    program: Program,
    segment: StepSpan,
    values: Mapping[int, Tensor],
    state: Mapping[str, Tensor],
    moment: Moment,
    saving: Saving | None = None,
) -> dict[int, Tensor]:
    """What a segment gives, of which backward computes again what it needs."""
    quietly = replace(moment, updates=False)

    def run(taken: Mapping[int, Tensor], again: bool) -> Mapping[int, Tensor]:
        running = _Running(program, dict(taken), state, quietly if again else moment)
        steps = range(segment.first, segment.stop)
        return running.steps(steps, set(segment.gives), remake=False)

    made = recomputed(run, segment, values)
    if saving is not None:
        for index, tensor in made.items():
            saving.made(index, tensor)
    return made


def _chosen(
    program: Program, choice: Choice, keep: set[int], span: range
) -> list[tuple[range, StepSpan | None]]:
    """The spans of a choice, with what those take and give that are computed again; found once."""
    key = (choice.spans, frozenset(keep), span)
    if key not in program.divisions:
        program.divisions[key] = [
            (part, segment_of(program, keep, part) if again else None)
            for part, again in spans_of(program, choice, span)
        ]
    return program.divisions[key]


def _divided(
    program: Program, parts: int, keep: set[int], span: range, moment: Moment
) -> list[StepSpan]:
    """Found once: every step and micro-batch asks for the same."""
    key = (parts, frozenset(keep), span)
    if key not in program.divisions:
        program.divisions[key] = divided(program, parts, keep, _sizes(program, moment), span)
    return program.divisions[key]


def _sizes(program: Program, moment: Moment) -> Callable[[int], int]:
    """Bytes of a value on this rank."""
    here = moment.here

    def size(index: int) -> int:
        spread = program.spreads.get(index)
        return (
            0
            if spread is None or here is None
            else math.prod(spread.local_shape(here.grid, here.rank))
        )

    return size


class _Running:
    """Some steps of a program under way, and the values that they have made."""

    def __init__(  # noqa: PLR0917 - likewise
        self,
        program: Program,
        values: dict[int, Tensor],
        state: Mapping[str, Tensor],
        moment: Moment,
        defer: Defer | None = None,
        saving: Saving | None = None,
        compiled: CompiledSpan | None = None,
    ) -> None:
        self.values = values
        self._defer, self._saving, self._compiled = defer, saving, compiled
        self.kept: dict[int, Kept] = {}
        """what was moved -> how to make it again"""
        self._program, self._state, self._moment = program, state, moment
        self._remake = True
        self._given = frozenset(values)
        """what was made elsewhere, which is not to be changed"""

    def steps(self, span: range, keep: set[int], *, remake: bool) -> dict[int, Tensor]:
        """Carry out some steps; values, of which those in `keep` are sure to be there.

        With `remake`, what was moved is made again in backward, from the owned part and strips.
        """
        self._remake = remake
        program = self._program
        with ExitStack() as casting:
            now: Autocast | None = None
            number = span.start
            while number < span.stop:
                step = program.steps[number]
                if isinstance(step, Compute) and step.node.autocast != now:
                    now = step.node.autocast
                    casting.close()
                    if now is not None:
                        casting.enter_context(_cast(now, self._device))
                if self._saving is not None:
                    self._saving.at(program.node_numbers[number])
                stop = self._at_once(number)
                if stop > number:
                    pass
                elif isinstance(step, Move):
                    self.move(step)
                else:
                    self.compute(step, number)
                stop = max(stop, number + 1)
                for index in itertools.chain.from_iterable(program.dying[number:stop]):
                    if index not in keep:
                        self.values.pop(index, None)
                        self.kept.pop(index, None)
                number = stop
        return self.values

    def _at_once(self, number: int) -> int:
        """Compute the steps from `number` on that are one graph, if they are; behind the last of them."""
        graphs = None if self._compiled is None else self._compiled.graphs
        graph = None if graphs is None else graphs.get(number)
        if graph is None:
            return number
        given = [self._get(ref) for ref in graph.reads]
        if not graph.usable(given):
            return number
        kept = self._kept_of(graph.reads) if self.kept else None
        with _remade_in_backward(kept, None) if kept else nullcontext():
            self.values |= graph(given)
        return graph.stop

    @property
    def _device(self) -> str:
        return next((t.device.type for t in self.values.values()), "cpu")

    def _get(self, ref: Ref) -> Tensor:
        if isinstance(ref, Value):
            return self.values[ref.index]
        return self._state[ref.name] if isinstance(ref, StateRef) else ref.tensor

    def move(self, step: Move) -> None:
        kept, source = Kept(), self._get(step.source)
        before = self.kept.get(step.source.index) if isinstance(step.source, Value) else None
        self.values[step.target] = exchange(source, step.exchange, self._moment.lines, kept, before)
        if kept.again is not None and self._remake and not self._spilled(source):
            self.kept[step.target] = kept
        self._note((step.target,), (self.values[step.target],))

    def _spilled(self, tensor: Tensor) -> bool:
        """Whether it will not be here in backward, so that nothing is to be made from it."""
        return self._saving is not None and self._saving.spills(tensor)

    def _note(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        if self._saving is not None:
            for index, tensor in zip(indices, tensors, strict=True):
                self._saving.made(index, tensor)

    def compute(self, step: Compute, number: int) -> None:
        operands = [self._get(ref) for ref in step.operands]
        kept = self._kept_of(step.operands) if self.kept else None
        if not step.node.grad:
            with torch.no_grad():
                result = self._result(step, number, operands)
        elif kept and torch.is_grad_enabled():
            with _remade_in_backward(kept, self._saving):
                result = self._result(step, number, operands)
        else:
            result = self._result(step, number, operands)
        if isinstance(result, Tensor):
            self.values[step.node.outputs[0]] = result
            self._note(step.node.outputs[:1], (result,))
            return
        made = [leaf for leaf in pytree.tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.values.update(zip(step.node.outputs, made, strict=True))
        self._note(step.node.outputs, made)

    def _is_own(self, ref: Ref) -> bool:
        return isinstance(ref, Value) and ref.index not in self._given

    def _kept_of(self, refs: Sequence[Ref]) -> list[tuple[Tensor, Kept]]:
        """The operands that can be made again."""
        return [
            (self.values[ref.index], self.kept[ref.index])
            for ref in refs
            if isinstance(ref, Value) and ref.index in self.kept
        ]

    def _result(self, step: Compute, number: int, operands: Sequence[Tensor]) -> Any:
        if self._compiled is not None and self._compiled.graphs is None and step.border is None:
            return self._compiled.watch(number, self._moment, operands)
        times = None if self._moment.budget is None else self._moment.budget.times
        if times is None:
            return self._computed(step, operands)
        with times.of(self._program.number_of(step.node)):
            return self._computed(step, operands)

    def _computed(self, step: Compute, operands: Sequence[Tensor]) -> Any:
        if self._defer is not None:
            return self._defer(step, lambda given: self._plain(step, given), operands)
        if step.in_place and self._is_own(step.operands[0]):
            return as_recorded(step.node, operands)
        return self._plain(step, operands)

    def _plain(self, step: Compute, operands: Sequence[Tensor]) -> Any:
        if step.border is not None:
            return step.border.run(operands, self._moment.lines)
        return step.local.run(self._moment, operands)


def _cast(autocast: Autocast, device: str) -> torch.autocast:
    """What the net has switched autocast to."""
    enabled, dtype = autocast
    return torch.autocast(device, dtype, enabled=enabled)


def _remade_in_backward(
    kept: Sequence[tuple[Tensor, Kept]], saving: Saving | None
) -> saved_tensors_hooks:
    """Save for backward not what was moved, but what it was made from: the owned part is saved by others
    already, and only the margins come on top.
    """
    known = {_memory(tensor): k for tensor, k in kept}

    def pack(tensor: Tensor) -> Any:
        found = known.get(_memory(tensor))
        if found is None:
            return tensor if saving is None else saving.pack(tensor)
        return found

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, Kept):
            return packed if saving is None else saving.unpack(packed)
        assert packed.again is not None
        return packed.again()

    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors share that are the same numbers; without addresses, which fake tensors do not have."""
    storage = memory_of(tensor)
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
