"""What ranks write becomes whole lines, on the terminal and in the logs."""

from __future__ import annotations

import os
import re
from typing import IO, Literal

__all__ = ["Display", "LogLines", "Stream", "Who"]

Stream = Literal["out", "err"]
Who = int | str
"""a rank by its number, or a helper, such as "h0" """

_USAGE = b"error: "
_LONGEST_BYTES = 65536


class Display:
    """Puts chunks of output together to lines and shows each in one write, so that none is torn.

    Only the last state of a line that was rewritten with carriage returns (a progress bar) is shown.
    A line `error: ...` on a rank's standard error is held back until the rank has written more or has
    ended otherwise: when it ends with code 2, the launcher tells that error itself, once for all ranks.
    Tracebacks and warnings that several ranks write in the same words are shown once.
    """

    def __init__(self, mode: Literal["prefix", "first"], out: int = 1, err: int = 2) -> None:
        self._mode = mode
        self._fds: dict[Stream, int] = {"out": out, "err": err}
        self._partial: dict[tuple[Who, Stream], bytes] = {}
        self._held: dict[Who, bytes] = {}
        self._folding = Folding()
        self._others_out = True
        self.silent = False
        """Nothing more is shown: the ranks are being stopped, and their last words are in the logs."""
        self.broken = False
        """Whoever read the launcher's output has gone away (`fivefold run ... | head`)."""

    def begin(self) -> None:
        """The ranks start again: what earlier ones told is no reason to be short."""
        self._folding = Folding()

    def only_errors_of_others(self) -> None:
        """Show of ranks but the first what they write to standard error only: there are many."""
        self._others_out = False

    def feed(self, rank: Who, stream: Stream, chunk: bytes) -> None:
        """Take the next bytes that `rank` wrote to `stream`, and show the lines they complete."""
        *lines, rest = (self._partial.pop((rank, stream), b"") + chunk).split(b"\n")
        if len(rest) > _LONGEST_BYTES and not rest.endswith(b"\r"):
            lines.append(rest)  # no line at all: what waits for its end would grow without one
            rest = b""
        if rest:
            self._partial[rank, stream] = rest[-_LONGEST_BYTES:]
        self._show(rank, stream, lines)

    def close(self, rank: Who, usage_error: bool = False) -> None:
        """Show what is left of a rank that has ended; drop the held line if it was a `usage_error`."""
        for stream in ("out", "err"):
            if rest := self._partial.pop((rank, stream), b""):
                self._show(rank, stream, [rest])
        if left := self._all(rank, self._folding.flush(rank)):
            self._write("err", left)
        held = self._held.pop(rank, b"")
        if held and not usage_error:
            self._write("err", self._prefixed(rank, held))

    def note(self, text: str) -> None:
        """Show a line of the launcher's own, on standard error."""
        self._write("err", text.encode() + b"\n")

    def _show(self, rank: Who, stream: Stream, lines: list[bytes]) -> None:
        text = b""
        for line in lines:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]
            if stream == "err":
                if rank in self._held:
                    text += self._prefixed(rank, self._held.pop(rank))
                if shown.startswith(_USAGE):
                    text += self._all(rank, self._folding.flush(rank))
                    self._held[rank] = shown
                else:
                    text += self._all(rank, self._folding.take(rank, shown))
            else:
                text += self._prefixed(rank, shown)
        wanted = rank == 0 or stream == "err" or self._others_out
        if text and ((self._mode == "prefix" and wanted) or (rank == 0 and stream == "out")):
            self._write(stream, text)

    def _all(self, rank: Who, lines: list[bytes]) -> bytes:
        return b"".join(self._prefixed(rank, line) for line in lines)

    def _prefixed(self, rank: Who, line: bytes) -> bytes:
        return (f"[{rank}] ".encode() if self._mode == "prefix" else b"") + line + b"\n"

    def _write(self, stream: Stream, text: bytes) -> None:
        if self.silent or self.broken:
            return
        try:
            while text:
                text = text[os.write(self._fds[stream], text) :]
        except BrokenPipeError:
            self.broken = True


class LogLines:
    """Writes one stream of a rank to its log in whole lines, since two streams share the log.

    A log that can no longer be written (the disk is full) is given up with a warning; the job goes on.
    """

    def __init__(self, log: IO[bytes]) -> None:
        self._log: IO[bytes] | None = log
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes and write the lines, and states of a progress bar, that they complete."""
        text = self._rest + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - cut > _LONGEST_BYTES:
            cut = len(text)
        self._write(text[:cut])
        self._rest = text[cut:]

    def flush(self) -> None:
        """Write what is left of an unfinished line."""
        self._write(self._rest)
        self._rest = b""

    def _write(self, text: bytes) -> None:
        try:
            while text and self._log is not None:
                text = text[self._log.write(text) :]
        except OSError as problem:
            assert self._log is not None
            os.write(2, f"warning: {self._log.name} ends here: {problem.strerror}\n".encode())
            self._log = None


# ---- Tracebacks and warnings that several ranks write in the same words, told once
#
# rank 0: Traceback ...        shown
# rank 1: Traceback ...        its last line, and that rank 0 has told the rest
# rank 0: a.py:3: UserWarning  shown
# rank 1: a.py:3: UserWarning  nothing: its log has it

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
