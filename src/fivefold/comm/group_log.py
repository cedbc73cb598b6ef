"""Operations of one group as the trace of the process notes them: which group, which number, what for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from fivefold.trace.current import usage
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.schema import DTYPES, KINDS, NOTHING, PHASES, TAGS
from fivefold.trace.trace import Trace

__all__ = ["DTYPE_NUMBERS", "KIND_NUMBERS", "GroupLog", "tag_of"]

KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}
KIND_NUMBERS["all_to_all_v"] = KIND_NUMBERS["all_to_all"]
DTYPE_NUMBERS: dict[torch.dtype, int] = {
    getattr(torch, name): number for number, name in enumerate(DTYPES) if hasattr(torch, name)
}
_OTHER_DTYPE = DTYPES.index("other")
_BACKWARD, _FORWARD = PHASES.index(Phase.BACKWARD), PHASES.index(Phase.FORWARD)
_GRADIENTS, _BATCH_NORM, _OTHER = (
    TAGS.index(tag) for tag in (Tag.GRADIENTS, Tag.BATCH_NORM, Tag.OTHER)
)
_BROADCAST = KIND_NUMBERS["broadcast"]
_MESSAGES = (KIND_NUMBERS["send"], KIND_NUMBERS["receive"])
_RECEIVE = KIND_NUMBERS["receive"]


def tag_of(text: str) -> int:
    """The number of the tag that a group's description is, or -1."""
    return TAGS.index(text) if text in TAGS else -1


class GroupLog:
    """Gives operations their numbers, also while no trace is active, so that all ranks agree on them.

    Collectives are counted per group. Messages are counted per group, peer and direction: the n-th that one
    rank sends to another is the n-th that the other receives from it.
    """

    def __init__(
        self, name: Callable[[], str], ranks: Callable[[], Sequence[int]], backend: str, tag: str = ""
    ) -> None:  # fmt: skip
        """`name` and `ranks` are asked once per trace: torch says them after the group was made."""
        self._name, self._ranks, self._backend = name, ranks, backend
        self.tag = tag_of(tag)
        """what the group is for, where operations do not say; -1: unknown"""
        self._described = tag
        self._collectives = itertools.count()
        self._messages: dict[tuple[int, int], itertools.count[int]] = {}
        self._trace: Trace | None = None
        self._index = NOTHING
        self._meeting = threading.Lock()

    def described(self, text: str) -> None:
        """Torch's description of the group: a tag, or some other name."""
        self.tag, self._described = tag_of(text), text

    def skip(self) -> None:
        """A collective that is not recorded."""
        next(self._collectives)

    def issue(
        self, trace: Trace, kind: int, size_bytes: int, dtype: torch.dtype | None, peer: int = -1
    ) -> int:  # fmt: skip
        """Note an operation; what `Trace.ended` wants."""
        if trace is not self._trace:
            self._meet(trace)
        tag = usage.tag
        if tag < 0:
            tag = self.tag if self.tag >= 0 else _guessed(kind, trace.phase, dtype)
        number = self._message(kind, peer) if kind in _MESSAGES else next(self._collectives)
        known = 0 if dtype is None else DTYPE_NUMBERS.get(dtype, _OTHER_DTYPE)
        return trace.issue(kind, tag, self._index, number, size_bytes, known, peer)

    def reserve(
        self, trace: Trace, kind: int, dtype: torch.dtype | None, peer: int = -1
    ) -> tuple[int, int, int, int, int]:
        """For a collective that the C core notes: row, seq, number, step and what, as in `ff_note`."""
        # As in `issue`, written out: in a step, a call more takes longer than what it would do.
        if trace is not self._trace:
            self._meet(trace)
        tag, phase = usage.tag, trace.phase
        if tag < 0:
            tag = self.tag if self.tag >= 0 else _guessed(kind, phase, dtype)
        known = 0 if dtype is None else DTYPE_NUMBERS.get(dtype, _OTHER_DTYPE)
        what = (
            kind | tag << 8 | phase << 16 | self._index << 24 | known << 32 | (peer & 0xFFFF) << 48
        )
        row, seq = trace.reserve()
        return row, seq, next(self._collectives), trace.step, what

    def _message(self, kind: int, peer: int) -> int:
        counter = self._messages.get((kind, peer))
        if counter is None:
            counter = self._messages.setdefault((kind, peer), itertools.count())
        return next(counter)

    def skip_message(self, kind: int, peer: int) -> None:
        """A message that is not recorded."""
        self._message(kind, peer)

    def _meet(self, trace: Trace) -> None:
        with self._meeting:
            if trace is not self._trace:
                key = self._name()
                ranks = [*self._ranks()]
                everyone = len(ranks) == trace.meta.get("size")
                name = self._described or ("all ranks" if everyone else f"group {key}")
                self._index = trace.new_group(name, ranks, self._backend, key)
                self._trace = trace


def _guessed(kind: int, phase: int, dtype: torch.dtype | None) -> int:
    """What an operation is for that nobody names: DistributedDataParallel issues its own from C++.

    In forward it sends buffers, those of batch norm as a rule; and once the order of its buckets, as int32.
    """
    if phase == _BACKWARD:
        return _GRADIENTS
    buffers = phase == _FORWARD and kind == _BROADCAST and dtype is not torch.int32
    return _BATCH_NORM if buffers else _OTHER
