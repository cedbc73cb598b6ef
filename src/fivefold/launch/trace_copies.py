"""Copies of the traces that ranks write on nodes which do not share the folder of traces with the launcher.

    launcher                                    agent of a node
    token in the folder ── START ─────────────> not found: the ranks write to a spool
              ask ─────────────── TRACES ─────> the next pages that have changed
    page by page into the copy <─ TRACES ─────  ... none: that was all for now, and a pause follows

A node sends what it is asked for: one message of 60 KiB at a time, behind logs and orders. Nothing is kept in
memory here. Writing takes a fifth of one core at most: the more there is to write, the longer the pauses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.launch.trace_spool import LIVE_PAGE, PAGE_BYTES, STAMP, STAMP_AT

__all__ = ["TraceCopies"]

_PAUSE_S = 1.0
"""between looks at the traces of a node"""
_SHARE = 10
"""writing, and as much again for reading it from the network, may take a fifth of the time"""
_SHARE_OF_RANKS = 50
"""looking at traces may take a fiftieth of a core, which ranks need"""
_PART = ".part"
_NAME = re.compile(r"rank-\d{5,}\.trace")


@dataclass
class _Spool:
    """The traces of a node."""

    host: str
    places: list[str]
    """folders there of which not all has come"""
    asked: bool = False
    due: float = 0.0
    """when to ask again"""
    spent_s: float = 0.0
    """on what the last look has found"""
    looks: int = -1
    """that are left until all has come; -1: ranks may still write"""
    lost: bool = False


class TraceCopies:
    """Asks the agents for traces, and writes them to the folders where ranks of this node would.

    Args:
        send: sends the agent of a node, by its number, the fields of a message.
        note: tells people.
    """

    def __init__(
        self, send: Callable[[int, Mapping[str, Any]], None], note: Callable[[str], object]
    ) -> None:
        self._send, self._note = send, note
        self._spools: dict[int, _Spool] = {}
        self._tokens: dict[str, Path] = {}
        """by folder, of those that traces may be written to"""
        self._whole: set[Path] = set()
        """copies that can be read"""
        self._problem = ""
        self._left: list[str] = []
        """where traces are that will not come"""
        self._end = 0.0

    def order(self, folder: str) -> dict[str, str] | None:
        """What agents have to know to see whether they share a folder; None if none is to be copied.

        The folder is made, with a file in it that is gone after `finish`.
        """
        if not folder or self._problem:
            return None
        if folder not in self._tokens:
            token = Path(folder) / f".shared-{secrets.token_hex(8)}"
            try:
                token.parent.mkdir(parents=True, exist_ok=True)
                token.touch()
            except OSError as problem:
                self._give_up(token.parent, problem)
                return None
            self._tokens[folder] = token
        return {"folder": folder, "token": self._tokens[folder].name}

    def ask_due(self) -> None:
        """Ask those whose pause is over. Call it now and then."""
        for number, spool in self._spools.items():
            if time.monotonic() >= spool.due:
                self._ask(number, spool)

    def heard(self, number: int, host: str, fields: Mapping[str, Any], payload: bytes) -> None:
        """An agent tells where the traces of its ranks are, or sends some of them."""
        if "problem" in fields:
            self._note(f"warning: traces of node {host} stay there: {fields['problem']}")
            self.lost(number)
            return
        spool = self._spools.setdefault(number, _Spool(host, []))
        if fields.get("start") and spool.lost:  # another agent, on a node that is back
            self._left += [f"{host}:{place}" for place in spool.places]
            spool = self._spools[number] = _Spool(host, [])
        spool.places = fields.get("places", spool.places)
        if fields.get("start"):
            return
        spool.asked = False
        if payload:
            began = time.monotonic()
            self._write(fields, payload)
            spool.spent_s += time.monotonic() - began
        else:
            ours_s, theirs_s = spool.spent_s * len(self._spools), fields.get("spent_s", 0.0)
            pause_s = max(_PAUSE_S, _SHARE * ours_s, _SHARE_OF_RANKS * theirs_s)
            spool.due, spool.spent_s = time.monotonic() + pause_s, 0.0
            spool.looks -= spool.looks > 0
        if payload or spool.looks > 0:
            self._ask(number, spool)

    def lost(self, number: int) -> None:
        """A node is gone."""
        if number in self._spools:
            self._spools[number].lost = True

    def finish(self, limit_s: float, turn: Callable[[], object]) -> None:
        """Wait, by `turn`, until all has come that ranks wrote, and tell where the rest is."""
        self._end = time.monotonic() + limit_s
        for number, spool in self._spools.items():
            spool.looks = 2 if spool.asked else 1  # one that has begun may have passed a file
            self._ask(number, spool)
        while any(map(self._awaited, self._spools.values())) and time.monotonic() < self._end:
            turn()
        left = self._left
        for number, spool in self._spools.items():
            if self._problem or spool.looks:
                left += [f"{spool.host}:{place}" for place in spool.places]
            else:
                self._send(number, {"remove": True})
        if left:
            self._note(f"warning: not all of the traces has come; the rest is in {', '.join(left)}")
        for token in self._tokens.values():
            with contextlib.suppress(OSError):
                for begun in (token, *token.parent.glob(f"*{_PART}")):
                    begun.unlink()
                token.parent.rmdir()  # if no rank has written a trace

    def hurry(self) -> None:
        """Somebody wants an end: wait no longer."""
        self._end = 0.0

    def _awaited(self, spool: _Spool) -> bool:
        return spool.looks > 0 and not spool.lost and not self._problem

    def _ask(self, number: int, spool: _Spool) -> None:
        if not spool.asked and not spool.lost and not self._problem:
            spool.asked = True
            self._send(number, {})

    def _write(self, fields: Mapping[str, Any], payload: bytes) -> None:
        folder, name = fields["folder"], fields["name"]
        if self._problem or folder not in self._tokens or not _NAME.fullmatch(name):
            return
        path = Path(folder) / name
        try:
            if _write_pages(path, fields["bytes"], fields["pages"], payload, path in self._whole):
                self._whole.add(path)
        except OSError as problem:
            self._give_up(path, problem)

    def _give_up(self, path: Path, problem: OSError) -> None:
        self._problem = problem.strerror or str(problem)
        self._note(
            f"warning: traces of other nodes stay there: cannot write {path}: {self._problem}"
        )


def _write_pages(path: Path, size: int, pages: list[int], payload: bytes, whole: bool) -> bool:
    """Some pages of a file; whether they were the last of this look. Raises `OSError`.

    Until then a stamp tells readers to wait; a file that is new appears with the last ones.
    """
    target = path if whole else path.with_name(f".{path.name}{_PART}")
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(fd).st_size < size:  # never shorter: readers map it
            os.ftruncate(fd, size)
        (stamp,) = STAMP.unpack(os.pread(fd, STAMP.size, STAMP_AT))
        os.pwrite(fd, STAMP.pack(stamp | 1), STAMP_AT)
        for place, number in enumerate(pages):
            page = payload[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
            if os.pwrite(fd, page, number * PAGE_BYTES) < len(page):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)
    if done := pages[-1] == LIVE_PAGE:
        target.replace(path)
    return done
