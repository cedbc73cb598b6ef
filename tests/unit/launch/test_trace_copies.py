"""Traces that are copied page by page: readers find one state of a file, or that it is none."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fivefold.launch.trace_copies import TraceCopies
from fivefold.launch.trace_spool import LIVE_PAGE, PAGE_BYTES, STAMP, STAMP_AT, TraceSpools
from fivefold.trace.file import name_of
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import HEADER_BYTES, LIVE, ProcessState, offset_of
from fivefold.trace.trace import Trace


class Wire:
    """An agent's traces and a launcher's copies, and the messages between them, one by one."""

    def __init__(self, folder: Path) -> None:
        self.spools, self.notes = TraceSpools(), list[str]()
        self.answers = True
        self._asked = list[Mapping[str, Any]]()
        self.copies = TraceCopies(lambda _, fields: self._asked.append(fields), self.notes.append)
        self.folder = folder
        assert self.copies.order(str(folder)) is not None
        self.begin()

    def begin(self, folder: Path | None = None) -> None:
        self.spool = Path(self.spools.begin(str(folder or self.folder)))
        self.copies.heard(0, "a", {"places": self.spools.places, "start": True}, b"")

    def turn(self) -> bool:
        """Deliver one question and its answer; whether there was one."""
        if not self._asked or not self.answers:
            return False
        if self._asked.pop(0).get("remove"):
            self.spools.remove()
        else:
            self.copies.heard(0, "a", *self.spools.next())
        return True

    def finish(self, limit_s: float = 30.0) -> None:
        self.copies.finish(limit_s, lambda: self.turn() or time.sleep(0.01))
        self.turn()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path / "trace")
    yield made
    made.spools.remove()


def stamp(data: bytes) -> int:
    return int(STAMP.unpack_from(data, STAMP_AT)[0])


def test_the_stamp_is_where_the_format_has_it() -> None:
    assert HEADER_BYTES + offset_of(LIVE, "stamp") == STAMP_AT
    assert HEADER_BYTES == PAGE_BYTES * LIVE_PAGE


def test_a_copy_is_whole_or_says_that_it_is_not(wire: Wire) -> None:
    chance = random.Random(0)
    trace = Trace.create(wire.spool, {"rank": 0, "size": 1})
    copy, times = wire.folder / name_of(0), 0
    for _ in range(30):
        for _ in range(chance.choice((0, 1, 700))):
            trace.push(2)
            trace.pop()
            trace.step_ended()
            trace.note("warning", text="w" * chance.randrange(300))
        if chance.random() < 0.5:
            trace.fold()
        source = trace.path.read_bytes()
        wire.copies._spools[0].due = 0.0  # pyright: ignore[reportPrivateUsage]
        wire.copies.ask_due()
        before = copy.read_bytes() if copy.exists() else b""
        while wire.turn():
            found = copy.read_bytes() if copy.exists() else b""
            times += found not in (before, source)
            assert found in (before, source) or stamp(found) % 2 == 1
        assert copy.read_bytes() == source
    assert times > 10, "no look was sent in several pieces"
    trace.close()
    wire.finish()
    assert RankTrace.load(copy).state == ProcessState.ENDED and not wire.notes
    assert not wire.spools.places and not trace.path.exists()


def test_a_rank_that_was_killed_while_it_added_up(wire: Wire) -> None:
    trace = Trace.create(wire.spool, {"rank": 0, "size": 1})
    trace.live["stamp"] += 1
    wire.finish()
    [problem] = RankTrace.load(wire.folder / name_of(0)).problems
    assert "stopped while it added up" in problem


def test_earlier_starts_go_once_they_have_come(wire: Wire, tmp_path: Path) -> None:
    first = Trace.create(wire.spool, {"rank": 0, "size": 1})
    again = tmp_path / "restart-1" / "trace"
    assert wire.copies.order(str(again)) is not None
    wire.begin(again)
    second = Trace.create(wire.spool, {"rank": 0, "size": 1})
    wire.copies.ask_due()
    while wire.turn():
        pass
    wire.finish()
    for trace, folder in ((first, wire.folder), (second, again)):
        assert (folder / name_of(0)).exists() and not trace.path.parent.exists()


def test_an_agent_that_does_not_answer_is_not_waited_for_long(wire: Wire) -> None:
    Trace.create(wire.spool, {"rank": 0, "size": 1})
    wire.answers = False
    began = time.monotonic()
    wire.finish(0.2)
    assert time.monotonic() - began < 10
    assert wire.notes == [f"warning: not all of the traces has come; the rest is in a:{wire.spool}"]
    assert not wire.folder.exists(), "an empty folder is left"
    wire.copies.finish(60.0, wire.copies.hurry)  # Ctrl-C
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", ["../rank-00000.trace", "x.trace", ".rank-00000.trace"])
def test_nothing_else_is_written(wire: Wire, name: str, tmp_path: Path) -> None:
    fields = {"folder": str(wire.folder), "name": name, "bytes": 8192, "pages": [0, 1]}
    wire.copies.heard(0, "a", fields, os.urandom(8192))
    elsewhere = fields | {"folder": str(tmp_path), "name": name_of(0)}
    wire.copies.heard(0, "a", elsewhere, os.urandom(8192))
    assert [path for path in tmp_path.rglob("*trace") if path.is_file()] == []
