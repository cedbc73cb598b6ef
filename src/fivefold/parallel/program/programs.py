"""The programs of a net: one for every shape of input and every state of the net that a forward can read.

A program is used for as long as its guards hold. Now and then the net is recorded again all the same, since
guards do not see everything that Python can do.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import warn
from fivefold.parallel.graph.fingerprint import Fingerprint, difference, fingerprint
from fivefold.parallel.graph.guards import settings
from fivefold.parallel.graph.record import record
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.graph.values import is_plain
from fivefold.parallel.program.costs import Options
from fivefold.parallel.program.program import Program, cheapest_thinnest, planned
from fivefold.parallel.program.rule import Here
from fivefold.parallel.program.spread import Grid, Spread
from fivefold.parallel.trees import flatten

__all__ = ["Programs"]

_KEPT = 8
"""programs that are kept for inputs of one shape"""
_LOOKED_AT = (2, 3)
"""steps with a program before which the net is recorded again, to see whether it still does the same"""
_RARELY = 1000
_TOLD_AFTER = 4
"""recordings one after the other until it is told that every step takes one"""


@dataclass(eq=False)
class _Known:
    """A program, and what it was made from."""

    program: Program
    mark: Fingerprint
    uses: int = 0
    """steps that have used it"""
    step: int = 0
    """the last of them"""
    inputs: list[Any] = field(default_factory=list[Any])
    """objects among the inputs, which are told apart by their identity"""


class Programs:
    """Makes and keeps the programs of `net` on `grid`; with `once`, none is looked at again."""

    def __init__(
        self, net: nn.Module, grid: Grid, device: torch.device, options: Options, *, once: bool
    ) -> None:
        self._net, self.grid, self._device = net, grid, device
        self._options, self._once = options, once
        self.step = 0
        """number of the step that is prepared"""
        self._left: dict[int, tuple[weakref.ref[Tensor], Spread]] = {}
        """what a forward has left in attributes, of which this rank has a part"""
        self._known: dict[Any, list[_Known]] = {}
        self._computed: set[str] = set()
        """where a forward has left something computed, of which other ranks may have nothing"""
        self._anew: dict[Any, tuple[str, int]] = {}
        """by what it is called with: recordings one after the other for the same reason"""
        self._volatile = False
        """whether the net does not do the same from one recording to the next"""

    def program(
        self, call: Callable[..., Any], inputs: Any, spreads: list[Spread], here: Here
    ) -> Program:
        """The program for such inputs and the net as it is: found, or recorded and planned.

        Raises `UsageError` for what cannot be recorded or planned.
        """
        around = (call, here.fewest >= self.grid.tiles, *settings(self._device))
        key, objects = _key(inputs, spreads, around)
        kept, reason = self._known.setdefault(key, []), ""
        for one in () if self._volatile else kept:
            assert one.program.tape.guards is not None
            reason = one.program.tape.guards.broken() or ""
            if not reason:
                self._anew.pop(key, None)
                kept.remove(one)
                kept.insert(0, one)
                return self._looked_at(one, call, inputs, spreads, here)
        begin = time.perf_counter()
        tape = self.recorded(call, inputs, spreads)
        program = self._planned(tape, call, inputs, spreads, here)
        kept.insert(0, _Known(program, program.marked(), 1, self.step, objects))
        del kept[_KEPT:]
        self._tell_anew(key, reason, time.perf_counter() - begin)
        return program

    def _planned(
        self, tape: Tape, call: Callable[..., Any], inputs: Any, spreads: list[Spread], here: Here
    ) -> Program:
        spreads = [*spreads, *(self._left[id(found.tensor)][1] for found in tape.carried)]
        thinnest = self._thinnest(tape, call, inputs, spreads, here)
        program = planned(tape, spreads, here, self._options, thinnest)
        program.mark = fingerprint(tape, self._computed)
        self._computed |= {one.path for one in tape.effects.sets if not one.plain}
        return program

    def _thinnest(
        self, tape: Tape, call: Callable[..., Any], inputs: Any, spreads: list[Spread], here: Here
    ) -> int:
        """Judged alike on all replicas; where each plans for itself, by the samples of the smallest."""
        uneven = self.grid.data is None and here.fewest != here.rows
        if not uneven or here.fewest < self.grid.tiles or self.grid.tiles == 1:
            return cheapest_thinnest(tape, spreads, here, self._options)
        even = [
            Spread((here.fewest, *s.shape[1:]), s.cuts) if s.shape[:1] == (here.rows,) else s
            for s in spreads
        ]
        judged = self.recorded(call, inputs, even)
        return cheapest_thinnest(judged, even, replace(here, rows=here.fewest), self._options)

    def _looked_at(
        self,
        known: _Known,
        call: Callable[..., Any],
        inputs: Any,
        spreads: list[Spread],
        here: Here,
    ) -> Program:
        """A program that holds, as far as guards know; now and then the net is recorded again to be sure."""
        if known.step == self.step or self._once:
            return known.program
        known.step, known.uses = self.step, known.uses + 1
        if known.uses not in _LOOKED_AT and known.uses % _RARELY:
            return known.program
        tape = self.recorded(call, inputs, spreads)
        apart = difference(known.mark, fingerprint(tape, self._computed))
        if apart is None:
            return known.program
        self._volatile = True
        warn(
            "the net does not compute the same twice, though nothing that it holds has changed, at "
            f"{apart}. It is recorded anew in every step, which is exact and slow: let what changes be "
            "an attribute of a module, an input, or a global that the forward names",
        )
        return self._planned(tape, call, inputs, spreads, here)

    def _tell_anew(self, key: Any, reason: str, seconds: float) -> None:
        """Warn once of a net that is recorded in every step."""
        before, times = self._anew.get(key, ("", 0))
        times = times + 1 if reason and reason == before else 1
        self._anew[key] = reason, times
        if times == _TOLD_AFTER:
            warn(
                f"{reason} is another one in every forward, so the net is recorded anew in every step "
                f"({seconds:.2f} s each): exact, and slow. Keep counters and the like out of the forward",
            )

    def look_again(self) -> None:
        """Let the next use of every program record the net again: an epoch begins, say."""
        for one in itertools.chain.from_iterable(self._known.values()):
            one.uses = 1

    def recorded(
        self,
        call: Callable[..., Any],
        inputs: Any,
        spreads: Sequence[Spread],
        rank: int | None = None,
    ) -> Tape:
        """The net as a list of calls, for inputs that lie so.

        What an earlier forward has left is whole then, or what one rank has of it.
        """
        shapes = [torch.Size(spread.shape) for spread in spreads]
        parts = functools.partial(self._shape_of_left, rank=rank)
        return record(self._net, call, inputs, shapes, self._device, parts)

    def note_left(self, leaf: Tensor, spread: Spread) -> None:
        """From now on it is known that a tensor is this rank's part of another."""
        if spread.is_whole:
            self._left.pop(id(leaf), None)
            return
        self._left = {key: one for key, one in self._left.items() if one[0]() is not None}
        self._left[id(leaf)] = (weakref.ref(leaf), spread)

    @property
    def left(self) -> list[Spread]:
        """How what forwards have left lies, of which this rank has a part."""
        return [spread for leaf, spread in self._left.values() if leaf() is not None]

    def _shape_of_left(self, tensor: Tensor, rank: int | None) -> tuple[int, ...] | None:
        found = self._left.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return None
        return found[1].shape if rank is None else found[1].local_shape(self.grid, rank)


def _key(inputs: Any, spreads: Sequence[Spread], around: Any) -> tuple[Any, list[Any]]:
    """What a program is made for, besides the net; and the objects in it that have to stay."""
    flat, structure = flatten(inputs)
    others = [leaf for leaf in flat if not isinstance(leaf, Tensor)]
    told = tuple((type(leaf), leaf if is_plain(leaf) else id(leaf)) for leaf in others)
    tensors = tuple((leaf.dtype, leaf.requires_grad) for leaf in flat if isinstance(leaf, Tensor))
    return (tuple(spreads), tensors, str(structure.spec), told, around), others
