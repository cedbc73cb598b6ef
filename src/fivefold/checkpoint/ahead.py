"""Blocks of several members fetched at once, a few ahead of where they are needed.

    member 0   a thread that reads  ----> [block][block][block] --\
    member 1   a thread that reads  ----> [block][block][block] ---+--> read(term) in the order of carry_out
    member 2   a thread that reads  ----> [block][block][block] --/

A thread is at most `DEPTH` blocks ahead and uses its buffers again: memory is members x (DEPTH + 2) blocks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from fivefold.checkpoint.pieces import PeerError
from fivefold.checkpoint.schemes import Piece, Term, reads
from fivefold.closing import Closing

__all__ = ["DEPTH", "Ahead", "Reader"]

DEPTH = 3
_LOOK_S = 0.05

Reader = Callable[[Term, int, memoryview], memoryview]
"""Reads `length` bytes of a term, or fewer where they end, into a buffer; returns what it filled."""


class Ahead(Closing):
    """What `carry_out(pieces, ahead.read, ..., block_bytes)` reads.

    Args:
        pieces: what will be carried out.
        readers: by member; each is called in one thread of its own.
        block_bytes: as given to `carry_out`.
        timeout_s: how long one block may take.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        readers: Mapping[int, Reader],
        block_bytes: int,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._pieces, self._block_bytes, self._timeout_s = pieces, block_bytes, timeout_s
        self._stop = threading.Event()
        self._lines: dict[int, queue.Queue[memoryview | Exception]] = {}
        self._threads: list[threading.Thread] = []
        for member in sorted({term.member for piece in pieces for term in piece.terms}):
            self._lines[member] = queue.Queue(DEPTH)
            thread = threading.Thread(
                target=self._fetch,
                args=(member, readers[member]),
                name=f"fivefold-fetch-{member}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def read(self, term: Term, length: int) -> memoryview:
        """The next block of the term's member; valid until the one after it is asked for.

        Raises what the reader raised, or `PeerError` when nothing comes in time.
        """
        try:
            block = self._lines[term.member].get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(
                f"member {term.member} gave nothing of its {term.of} within {self._timeout_s:g} s "
                f"({length} bytes from {term.start})"
            ) from None
        if isinstance(block, Exception):
            raise block
        return block

    def close(self) -> None:
        """Let the threads end; those that wait for bytes end when their reader does."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the threads after `close`."""
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _fetch(self, member: int, reader: Reader) -> None:
        rooms = [memoryview(bytearray(self._block_bytes)) for _ in range(DEPTH + 2)]
        wanted = ((t, n) for t, n in reads(self._pieces, self._block_bytes) if t.member == member)
        for number, (term, length) in enumerate(wanted):
            try:
                got: memoryview | Exception = reader(term, length, rooms[number % len(rooms)])
            except Exception as problem:  # noqa: BLE001 - raised where the block is read
                got = problem
            if not self._put(self._lines[member], got) or isinstance(got, Exception):
                return

    def _put(self, line: queue.Queue[memoryview | Exception], got: memoryview | Exception) -> bool:
        while not self._stop.is_set():
            try:
                line.put(got, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
