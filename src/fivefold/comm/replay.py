"""What a part of a forward pass received, kept so that it can run again without communication.

log = Log()
with log.turn(): ...     collectives and messages as ever; their results are noted
with log.turn(): ...     the same calls again: each is answered with what it gave the first time
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

__all__ = ["Log", "current_log"]


@dataclass
class Log:
    """Results of `all_gather`, `all_reduce` and messages, in the order of the calls of one thread."""

    answers: list[Tensor | Mapping[int, Tensor]] = field(
        default_factory=list["Tensor | Mapping[int, Tensor]"]
    )
    complete: bool = False
    """whether the first turn has ended: from then on calls are answered"""
    _position: int = 0

    @contextmanager
    def turn(self) -> Generator[bool]:
        """Note what the block receives, or answer it; yields whether it is answered."""
        outer, _here.log = _here.log, self
        self._position = 0
        try:
            yield self.complete
        finally:
            _here.log, self.complete = outer, True

    def add(self, answer: Tensor | Mapping[int, Tensor]) -> None:
        """Note what a call gave."""
        self.answers.append(answer)

    def tensor(self) -> Tensor:
        """What the next collective gave."""
        return cast(Tensor, self._next())

    def messages(self) -> Mapping[int, Tensor]:
        """What the next messages brought."""
        return cast("Mapping[int, Tensor]", self._next())

    def _next(self) -> Tensor | Mapping[int, Tensor]:
        assert self._position < len(self.answers), "the second turn calls what the first did not"
        self._position += 1
        return self.answers[self._position - 1]


class _Replaying(threading.local):
    log: Log | None = None


_here = _Replaying()


def current_log() -> Log | None:
    """The log of the turn that this thread is in."""
    return _here.log
