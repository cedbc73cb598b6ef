"""Segments that outlive the processes that made them: a node agent keeps them, by name."""

from __future__ import annotations

import os
import threading

from fivefold.arena.gate import Connection, Gate, connect
from fivefold.arena.native import ArenaError
from fivefold.arena.segment import Segment
from fivefold.closing import Closing

__all__ = ["Keeper", "fetch", "give", "withdraw"]

_LINE_S = 10.0


class Keeper(Closing):
    """A thread of an agent that takes segments into keeping, and gives them to who asks.

    A segment lives as long as any process knows it. One that a rank makes for itself ends with the ranks;
    one that it gives to a keeper stays until it is withdrawn, or the agent ends: the state of a run that is
    restarted, or weights that several runs read.
    """

    def __init__(self) -> None:
        self._gate = Gate()
        self.address = self._gate.address
        """what others `give` to and `fetch` from"""
        self._kept: dict[str, int] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="fivefold-keeper", daemon=True)
        self._thread.start()

    def names(self) -> list[str]:
        """What is kept."""
        return sorted(self._kept)

    def close(self) -> None:
        """Forget everything; it lives on where it is mapped."""
        if not self._stopping:
            self._stopping = True
            connect(self.address, _LINE_S).close()
            self._thread.join()
            self._gate.close()
            for fd in self._kept.values():
                os.close(fd)

    def _serve(self) -> None:
        while not self._stopping:
            try:
                with self._gate.accept(3600.0) as line:
                    if not self._stopping:
                        self._answer(line)
            except ArenaError:  # nobody called for an hour, or a caller hung up: keep on
                continue

    def _answer(self, line: Connection) -> None:
        message, fds = line.receive()
        verb, _, name = message.decode(errors="replace").partition(" ")
        known = self._kept.get(name)
        if verb == "give" and len(fds) == 1 and known is None:
            self._kept[name] = fds.pop()
            line.send(b"kept")
        elif verb == "fetch" and known is not None:
            line.send(b"here", [known])
        elif verb == "withdraw" and known is not None:
            os.close(self._kept.pop(name))
            line.send(b"gone")
        else:
            kept = ", ".join(self.names()) or "nothing"
            line.send(f"no: {'kept already' if known is not None else f'it keeps {kept}'}".encode())
        for fd in fds:
            os.close(fd)


def give(address: str, name: str, segment: Segment) -> None:
    """Let the keeper at `address` keep a segment. Raises `ArenaError` if it has one of that name."""
    _ask(address, "give", name, [segment.fd])


def fetch(address: str, name: str) -> Segment:
    """A segment that is kept. Raises `ArenaError` if there is none of that name."""
    return Segment.attach(_ask(address, "fetch", name)[0])


def withdraw(address: str, name: str) -> None:
    """Keep it no longer. Raises `ArenaError` if there is none of that name."""
    _ask(address, "withdraw", name)


def _ask(address: str, verb: str, name: str, fds: list[int] | None = None) -> list[int]:
    with connect(address, _LINE_S) as line:
        line.send(f"{verb} {name}".encode(), fds)
        answer, received = line.receive()
    if answer.startswith(b"no"):
        raise ArenaError(f"the keeper cannot {verb} {name!r}{answer[2:].decode(errors='replace')}")
    return received
