"""Carrying out a program on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.parallel.graph.refs import Ref, StateRef, Value, refs_of
from fivefold.parallel.graph.tape import Autocast
from fivefold.parallel.program.exchange import Kept, exchange
from fivefold.parallel.program.in_place import as_recorded
from fivefold.parallel.program.program import Compute, Move, Program
from fivefold.parallel.program.recompute import StepSpan, divided, recomputed, segments
from fivefold.parallel.program.rule import Moment
from fivefold.torch_private import memory_of, pytree

__all__ = ["Defer", "carry_out", "execute", "left", "returned"]


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
    parts = segments(moment.recompute, len(span))
    if not (parts and torch.is_grad_enabled()):
        running = _Running(program, values, state, moment, defer)
        return running.steps(span, keep, remake=True)
    quietly = replace(moment, updates=False)
    for segment in _divided(program, parts, keep, span, moment):

        def run(
            taken: Mapping[int, Tensor], again: bool, segment: StepSpan = segment
        ) -> Mapping[int, Tensor]:
            running = _Running(program, dict(taken), state, quietly if again else moment)
            steps = range(segment.first, segment.stop)
            return running.steps(steps, set(segment.gives), remake=False)

        values |= recomputed(run, segment, values)
    return values


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

    def __init__(
        self,
        program: Program,
        values: dict[int, Tensor],
        state: Mapping[str, Tensor],
        moment: Moment,
        defer: Defer | None = None,
    ) -> None:
        self.values = values
        self._defer = defer
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
            for number in span:
                step = program.steps[number]
                if isinstance(step, Compute) and step.node.autocast != now:
                    now = step.node.autocast
                    casting.close()
                    if now is not None:
                        casting.enter_context(_cast(now, self._device))
                if isinstance(step, Move):
                    self.move(step)
                else:
                    self.compute(step)
                for index in program.dying[number]:
                    if index not in keep:
                        self.values.pop(index, None)
                        self.kept.pop(index, None)
        return self.values

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
        if kept.again is not None and self._remake:
            self.kept[step.target] = kept

    def compute(self, step: Compute) -> None:
        operands = [self._get(ref) for ref in step.operands]
        kept = self._kept_of(step) if self.kept else None
        if not step.node.grad:
            with torch.no_grad():
                result = self._result(step, operands)
        elif kept and torch.is_grad_enabled():
            with _remade_in_backward(kept):
                result = self._result(step, operands)
        else:
            result = self._result(step, operands)
        if isinstance(result, Tensor):
            self.values[step.node.outputs[0]] = result
            return
        made = [leaf for leaf in pytree.tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.values.update(zip(step.node.outputs, made, strict=True))

    def _is_own(self, ref: Ref) -> bool:
        return isinstance(ref, Value) and ref.index not in self._given

    def _kept_of(self, step: Compute) -> list[tuple[Tensor, Kept]]:
        """The operands that can be made again."""
        return [
            (self.values[ref.index], self.kept[ref.index])
            for ref in step.operands
            if isinstance(ref, Value) and ref.index in self.kept
        ]

    def _result(self, step: Compute, operands: Sequence[Tensor]) -> Any:
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


def _remade_in_backward(kept: Sequence[tuple[Tensor, Kept]]) -> saved_tensors_hooks:
    """Save for backward not what was moved, but what it was made from: the owned part is saved by others
    already, and only the margins come on top.
    """
    known = {_memory(tensor): k for tensor, k in kept}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        found = known.get(_memory(tensor))
        if found is None:
            return tensor
        assert found.again is not None
        return found.again

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors share that are the same numbers; without addresses, which fake tensors do not have."""
    storage = memory_of(tensor)
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
