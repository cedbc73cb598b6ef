"""Who has called and not proved yet who it is."""

from __future__ import annotations

import socket
import time

import pytest

from fivefold.wire import Callers
from fivefold.wire.handshake import received


def test_of_too_many_the_one_that_has_waited_longest_is_hung_up() -> None:
    callers, gone = Callers(most=3, of_one=2), list[str]()
    numbers = {
        name: callers.add(name[0], lambda name=name: gone.append(name))
        for name in ("a1", "b1", "a2", "a3", "c1", "c2")
    }
    assert gone == ["a1", "b1", "a2"] and len(callers) == 3
    callers.left(numbers["a3"])
    callers.left(numbers["a3"])
    callers.add("a", lambda: gone.append("a4"))
    assert gone == ["a1", "b1", "a2"]
    callers.close()
    assert gone == ["a1", "b1", "a2", "c1", "c2", "a4"] and len(callers) == 0


def test_callers_without_an_address_count_in_all_only() -> None:
    gone = list[int]()
    callers = Callers(most=3, of_one=1)
    for number in range(4):
        callers.add("", lambda number=number: gone.append(number))
    assert gone == [0]


def test_one_that_cannot_be_hung_up_any_more_is_forgotten() -> None:
    line = socket.socket()
    line.close()
    callers = Callers(most=1, of_one=1)
    callers.add("a", lambda: line.shutdown(socket.SHUT_RDWR))
    callers.add("a", lambda: None)
    assert len(callers) == 1


def test_bytes_that_come_one_by_one_have_to_come_in_time_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"whole")
        assert received(ours, 5, time.monotonic() + 60) == b"whole"
        theirs.sendall(b"part")
        with pytest.raises(TimeoutError):
            received(ours, 5, time.monotonic() + 0.05)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            received(ours, 5, time.monotonic() + 60)
