"""Traces of ranks on a node that does not share the folder of traces with the launcher.

    ranks ── map and write, as everywhere ──> spool of the node ── pages that have changed ──> copies

A trace is a file of a fixed size that changes in place, so it is sent by pages. Its row `live` holds the
stamp by which readers know a state that is whole: that page is the last of each look at the file.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["LIVE_PAGE", "PAGE_BYTES", "STAMP", "STAMP_AT", "TraceSpools"]

PAGE_BYTES = 4096
LIVE_PAGE = 1
STAMP, STAMP_AT = struct.Struct("<Q"), LIVE_PAGE * PAGE_BYTES + 8
"""odd while what a trace has added up does not fit its events; see docs/reference/trace-file.md"""
_PIECE_PAGES = 15
"""sent at once, before logs and orders get their turn again"""
_ZERO = hash(bytes(PAGE_BYTES))
_LOOKS = 4

Piece = tuple[dict[str, Any], bytes]
"""fields and payload of a message"""


class TraceSpools:
    """What the ranks of a node write, a folder for each start, as far as the launcher has not got it."""

    def __init__(self) -> None:
        self._starts: list[tuple[str, Path]] = []
        """where the launcher writes the copies, and what is to be copied"""
        self._sent: dict[Path, dict[int, int]] = {}
        """by file and page: the hash of what was sent"""
        self._look = self._changes()
        self._spent_s = 0.0

    @property
    def places(self) -> list[str]:
        """Folders of this node with traces that are not all known to have come."""
        return [str(folder) for _, folder in self._starts]

    def begin(self, folder: str) -> str:
        """A place for the ranks of a start, whose copies lie in `folder`. Raises `OSError`."""
        self._starts.append((folder, Path(tempfile.mkdtemp(prefix="fivefold-spool-"))))
        return self.places[-1]

    def next(self) -> Piece:
        """What to send now; without a payload if the launcher has got all that was there."""
        began = time.thread_time()
        try:
            piece = next(self._look, None)
        except OSError as problem:
            return {"problem": f"{problem.filename}: {problem.strerror}"}, b""
        self._spent_s += time.thread_time() - began
        if piece is None:
            piece = {"places": self.places, "spent_s": self._spent_s}, b""
            self._look, self._spent_s = self._changes(), 0.0
        return piece

    def remove(self) -> None:
        """All has come."""
        for _, folder in self._starts:
            shutil.rmtree(folder, ignore_errors=True)
        self._starts.clear()

    def _changes(self) -> Iterator[Piece]:
        for start in [*self._starts]:
            unchanged = True
            for path in sorted(start[1].glob("*.trace")):
                for fields, payload in self._changed(path):
                    unchanged = False
                    yield {"folder": start[0], **fields}, payload
            if unchanged and start is not self._starts[-1]:
                self._starts.remove(start)
                shutil.rmtree(start[1], ignore_errors=True)

    def _changed(self, path: Path) -> Iterator[Piece]:
        data, sent = memoryview(_whole(path)), self._sent.setdefault(path, {})
        if len(data) <= STAMP_AT or len(data) % PAGE_BYTES:
            return  # no trace
        pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
        found = {n: h for n, h in enumerate(map(hash, pages)) if h != sent.get(n, _ZERO)}
        order = [*(n for n in found if n != LIVE_PAGE), LIVE_PAGE] if found else []
        for first in range(0, len(order), _PIECE_PAGES):
            some = order[first : first + _PIECE_PAGES]
            sent.update((n, found[n]) for n in some if n in found)
            told = {"name": path.name, "bytes": len(data), "pages": some}
            yield told, b"".join(pages[n] for n in some)


def _whole(path: Path) -> bytes:
    """A file in one state; if its rank adds up all the time, or was killed at that, its stamp is odd."""
    data = b""
    for _ in range(_LOOKS):
        with path.open("rb") as file:
            data = file.read()
            file.seek(STAMP_AT)
            if data[STAMP_AT : STAMP_AT + STAMP.size] == file.read(STAMP.size):
                return data
    (stamp,) = STAMP.unpack_from(data, STAMP_AT)
    return data[:STAMP_AT] + STAMP.pack(stamp | 1) + data[STAMP_AT + STAMP.size :]
