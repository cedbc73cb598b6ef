"""The keys of a step's random calls, in order; and the same keys again where a part of the net runs twice.

Activation checkpointing runs a part of the net once more during backward. It has to draw what it drew the
first time, so a step notes where in the sequence of draws each module began:

    forward    body ──► block1 ─ draw 0, draw 1 ──► block2 ─ draw 2, draw 3 ──► head ─ draw 4
                        begins at 0                 begins at 2
    backward   block2 runs again: draws 2, 3        block1 runs again: draws 0, 1
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fivefold.errors import UsageError
from fivefold.parallel import randomness

__all__ = ["Keys", "Replay"]


@dataclass
class Keys:
    """Keys that are functions of (seed, step, node, number of the node's call), as they are drawn."""

    seed: int
    step: int
    drawn: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """node and key of every draw so far"""
    _calls: Counter[str] = field(default_factory=Counter[str])
    _begins: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def begin(self, module: str) -> None:
        """Note that a module starts to run in the forward pass."""
        self._begins.setdefault(module, []).append(len(self.drawn))

    def draw(self, node: str) -> int:
        """The key of the next random call of `node` in the forward pass."""
        key = randomness.key_of(self.seed, self.step, node, self._calls[node])
        self._calls[node] += 1
        self.drawn.append((node, key))
        return key

    def replay(self, module: str) -> Replay:
        """What `module` draws when it runs again in the backward pass."""
        return Replay(self, module, self._begins.get(module, []))


class Replay:
    """The draws of a checkpointed module that runs again."""

    def __init__(self, keys: Keys, module: str, begins: list[int]) -> None:
        self._keys, self._module, self._begins = keys, module, begins
        self._position = begins[0] if begins else 0

    def draw(self, node: str) -> int:
        """The key that the same call drew in the forward pass.

        Raises `UsageError` if that cannot be told: the module ran several times, or runs otherwise now.
        """
        drawn, position = self._keys.drawn, self._position
        known = position < len(drawn) and drawn[position][0] == node
        if len(self._begins) != 1 or not known:
            raise UsageError(
                f"the module {self._module!r} is checkpointed, draws random numbers, and ran "
                f"{len(self._begins)} times in the forward pass: which of its masks to draw again cannot be "
                "told. Checkpoint a module that runs once and contains the repetition, or give each "
                "repetition a module of its own"
            )
        self._position += 1
        return drawn[position][1]
