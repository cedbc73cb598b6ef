"""Tracebacks and warnings that several ranks write in the same words, told once.

rank 0: Traceback ...        shown
rank 1: Traceback ...        its last line, and that rank 0 has told the rest
rank 0: a.py:3: UserWarning  shown
rank 1: a.py:3: UserWarning  nothing: its log has it
"""

from __future__ import annotations

import re

__all__ = ["Folding"]

# Torch begins the lines of a traceback with the rank where a group is running.
_RANK = re.compile(rb"^\[rank\d+\]: ?")
_TRACEBACK = b"Traceback (most recent call last):"
_WARNING = re.compile(rb"\S.*:\d+: \w*Warning: ")
_MOST_LINES = 2000
_MOST_TOLD = 1000


class Folding:
    """Takes lines one by one; those of a traceback are kept until it is whole."""

    def __init__(self) -> None:
        self._open: dict[int | str, list[bytes]] = {}
        self._told: dict[bytes, int | str] = {}
        self._warned: dict[int | str, bool] = {}
        """ranks whose last line began a warning, and whether it was shown"""

    def take(self, rank: int | str, line: bytes) -> list[bytes]:
        """The lines of `rank` to show, now that it has written this one."""
        own = _RANK.sub(b"", line, count=1)
        if rank in self._open:
            self._open[rank].append(line)
            inside = own.startswith(b" ") or not own
            return [] if inside and len(self._open[rank]) < _MOST_LINES else self.flush(rank)
        shown = self._warned.pop(rank, True)
        if own == _TRACEBACK:
            self._open[rank] = [line]
            return []
        if _WARNING.match(own):
            shown = self._warned[rank] = self._first(own, rank) == rank
        elif not own.startswith(b" "):  # the line of the source, below a warning
            shown = True
        return [line] if shown else []

    def flush(self, rank: int | str) -> list[bytes]:
        """What is kept of `rank`, as it is shown."""
        lines = self._open.pop(rank, [])
        first = self._first(b"\n".join(_RANK.sub(b"", line, count=1) for line in lines), rank)
        if first == rank:
            return lines
        return [lines[-1] + f" (with the traceback of rank {first})".encode()]

    def _first(self, text: bytes, rank: int | str) -> int | str:
        """Who has told it first."""
        if not text or len(self._told) >= _MOST_TOLD:
            return self._told.get(text, rank)
        return self._told.setdefault(text, rank)
