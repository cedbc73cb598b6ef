"""Chunks of bytes become whole lines with a prefix, however the bytes were cut."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.launch.output import Display, LogLines


class Screen:
    """A display whose two outputs are pipes, each read back as the list of single writes.

    As a context manager it closes what was never read: hypothesis gives up examples half-way.
    """

    def __init__(self, mode: str = "prefix") -> None:
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.display = Display(mode, out, err)  # type: ignore[arg-type]
        self._ends = (out, err)
        self._read = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._read:
            self.read()

    def read(self) -> tuple[str, str]:
        self._read = True
        for end in self._ends:
            os.close(end)
        texts: list[str] = []
        for fd in (self.out, self.err):
            with os.fdopen(fd, "rb") as file:
                texts.append(file.read().decode())
        return texts[0], texts[1]


def test_every_line_carries_its_rank() -> None:
    screen = Screen()
    screen.display.feed(0, "out", b"one\ntw")
    screen.display.feed(11, "out", b"three\n")
    screen.display.feed(0, "err", b"oops\n")
    screen.display.feed(0, "out", b"o\n")
    assert screen.read() == ("[0] one\n[11] three\n[0] two\n", "[0] oops\n")


FAILED = b"Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    f()\nKeyError: 'x'\n"
WARNED = b"/b/a.py:3: UserWarning: look out\n  f()\n"


def test_what_ranks_write_in_the_same_words_is_shown_once() -> None:
    screen = Screen()
    for rank in range(3):
        screen.display.feed(rank, "err", WARNED + FAILED + b"after\n")
    shown = "".join(f"[0] {line}\n" for line in (WARNED + FAILED).decode().splitlines())
    again = "".join(
        f"[{r}] KeyError: 'x' (with the traceback of rank 0)\n[{r}] after\n" for r in (1, 2)
    )
    assert screen.read()[1] == f"{shown}[0] after\n{again}"


def test_what_differs_is_shown_and_what_one_rank_repeats_too() -> None:
    screen = Screen()
    other = FAILED.replace(b"line 3", b"line 4")
    screen.display.feed(0, "err", WARNED + FAILED + FAILED + WARNED)
    screen.display.feed(1, "err", other + WARNED.replace(b"look", b"watch") + b"  indented\n")
    told = screen.read()[1]
    assert told.count("[0]     f()") == 2 and told.count("[0] /b/a.py") == 2
    assert told.count("line 4") == 1 and "[1] /b/a.py:3: UserWarning: watch out" in told
    assert told.endswith("[1]   indented\n")


def test_a_traceback_that_is_cut_off_is_shown_and_torch_may_name_the_rank() -> None:
    screen = Screen()
    for rank in range(2):
        named = b"".join(b"[rank%d]: " % rank + line for line in FAILED.splitlines(keepends=True))
        screen.display.feed(rank, "err", named)
    screen.display.feed(2, "err", FAILED[:60])
    screen.display.close(2)
    *whole, folded, first, last = screen.read()[1].splitlines()
    assert len(whole) == 4
    assert folded == "[1] [rank1]: KeyError: 'x' (with the traceback of rank 0)"
    assert first == "[2] Traceback (most recent call last):" and last.startswith("[2]   File")


@given(st.data())
def test_lines_do_not_depend_on_how_bytes_arrive(data: st.DataObject) -> None:
    lines = {
        rank: data.draw(st.lists(st.text("ab é", max_size=6), max_size=5), label=f"rank {rank}")
        for rank in (0, 1)
    }
    left = {rank: "".join(f"{line}\n" for line in lines[rank]).encode() for rank in lines}
    with Screen() as screen:
        while any(left.values()):
            rank = data.draw(st.sampled_from([rank for rank in left if left[rank]]))
            size = data.draw(st.integers(1, len(left[rank])))
            screen.display.feed(rank, "out", left[rank][:size])
            left[rank] = left[rank][size:]
        shown = screen.read()[0].split("\n")[:-1]
    for rank, written in lines.items():
        assert [line[4:] for line in shown if line.startswith(f"[{rank}] ")] == written
    assert len(shown) == sum(map(len, lines.values()))


def test_a_progress_bar_shows_its_last_state() -> None:
    screen = Screen()
    screen.display.feed(0, "err", b"10 %\r50 %\r")
    screen.display.feed(0, "err", b"100 %\r\ndone\n")
    assert screen.read()[1] == "[0] 100 %\n[0] done\n"


def test_an_unfinished_line_appears_when_the_rank_ends() -> None:
    screen = Screen()
    screen.display.feed(0, "out", b"no newline")
    screen.display.close(0)
    screen.display.close(0)
    assert screen.read() == ("[0] no newline\n", "")


def test_the_error_of_a_user_is_left_to_the_launcher() -> None:
    screen = Screen()
    screen.display.feed(0, "err", b"warned\nerror: no such folder\n")
    screen.display.close(0, usage_error=True)
    assert screen.read() == ("", "[0] warned\n")


def test_an_error_line_of_any_other_end_is_shown() -> None:
    screen = Screen()
    screen.display.feed(0, "err", b"error: first\nmore\nerror: last\n")
    screen.display.close(0)
    assert screen.read()[1] == "[0] error: first\n[0] more\n[0] error: last\n"


def test_first_shows_the_output_of_rank_0_as_it_is() -> None:
    screen = Screen("first")
    screen.display.feed(0, "out", b"mine\n")
    screen.display.feed(0, "err", b"warning\n")
    screen.display.feed(1, "out", b"theirs\n")
    assert screen.read() == ("mine\n", "")


def test_of_many_ranks_the_first_is_shown_and_the_errors_of_others() -> None:
    screen = Screen()
    screen.display.only_errors_of_others()
    for rank in (0, 1, "h0"):
        screen.display.feed(rank, "out", b"a figure\n")
        screen.display.feed(rank, "err", f"trouble of {rank}\n".encode())
    out, err = screen.read()
    assert out == "[0] a figure\n"
    assert err == "[0] trouble of 0\n[1] trouble of 1\n[h0] trouble of h0\n"


def test_silence() -> None:
    screen = Screen()
    screen.display.silent = True
    screen.display.feed(0, "out", b"last words\n")
    assert screen.read() == ("", "")


def test_a_reader_that_went_away_is_noticed() -> None:
    screen = Screen()
    os.close(screen.out)
    screen.display.feed(0, "out", b"anybody?\n")
    assert screen.display.broken
    screen.out = os.dup(screen.err)
    screen.read()


def test_two_streams_share_a_log_line_by_line() -> None:
    log = io.BytesIO()
    out, err = LogLines(log), LogLines(log)
    out.feed(b"one\ntw")
    err.feed(b"oops\n10 %\r20")
    out.feed(b"o\n")
    out.flush()
    err.flush()
    assert log.getvalue() == b"one\noops\n10 %\rtwo\n20"


def test_a_line_without_end_is_not_kept_forever() -> None:
    log = io.BytesIO()
    lines = LogLines(log)
    for _ in range(100):
        lines.feed(b"x" * 1000)
    assert len(log.getvalue()) > 60_000


def test_a_full_disk_ends_the_log_and_not_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        lines = LogLines(full)
        lines.feed(b"one\n")
        lines.feed(b"two\n")
    assert capfd.readouterr().err == "warning: /dev/full ends here: No space left on device\n"
