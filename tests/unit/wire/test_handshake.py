"""The handshake over real sockets: who knows the key, and everybody else."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable

import pytest

from fivefold.wire import Listener, OtherKey, OtherProtocol, OtherVersion, Protocol, new_key

SPOKEN = Protocol("fivefold test", "001")
KEY = new_key()


def both(call: Callable[[socket.socket], None], key: bytes = KEY) -> BaseException | None:
    """What `SPOKEN` raises at the listener while `call` has the other end."""
    found: list[BaseException | None] = []

    def answer(line: socket.socket) -> None:
        try:
            SPOKEN.answer(line, key, time.monotonic() + 5)
            found.append(None)
        except (OSError, OtherKey) as problem:
            found.append(problem)
        line.close()

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer, args=(ours,))
    thread.start()
    try:
        call(theirs)
    finally:
        theirs.close()
        thread.join(10)
    return found[0]


def calling(protocol: Protocol, key: bytes) -> Callable[[socket.socket], None]:
    return lambda line: protocol.call(line, key, time.monotonic() + 5)


def test_both_know_the_key() -> None:
    assert both(calling(SPOKEN, KEY)) is None


def test_a_caller_with_another_key_is_refused_and_told() -> None:
    def call(line: socket.socket) -> None:
        with pytest.raises(OtherKey):
            SPOKEN.call(line, new_key(), time.monotonic() + 5)

    assert isinstance(both(call), OtherKey)


@pytest.mark.parametrize(
    ("other", "raises"),
    [
        (Protocol("fivefold else", "001"), OtherProtocol),
        (Protocol("fivefold test", "7"), OtherVersion),
    ],
)
def test_another_protocol_is_told_before_anything_is_proved(
    other: Protocol, raises: type[Exception]
) -> None:
    with pytest.raises(raises) as told:
        both(calling(other, KEY))
    assert str(told.value) == ("001" if raises is OtherVersion else "")


def test_the_proof_of_one_protocol_is_none_of_another() -> None:
    """The listener's own words, sent back or under another name, prove nothing."""

    def reflect(line: socket.socket) -> None:
        head = line.recv(48)
        line.sendall(head[16:] + secrets.token_bytes(32))
        assert line.recv(32) == bytes(32)

    assert isinstance(both(reflect), OtherKey)
    codes = {
        protocol._code(KEY, whose, b"a" * 32, b"b" * 32)  # pyright: ignore[reportPrivateUsage]
        for protocol in (SPOKEN, Protocol("fivefold test", "002"), Protocol("fivefold else", "001"))
        for whose in (b"caller", b"listener")
    }
    assert len(codes) == 6


def test_a_listener_that_knows_no_key_is_not_believed() -> None:
    def lie(line: socket.socket) -> None:
        line.sendall(b"fivefold test001" + bytes(32))
        line.recv(64)
        line.sendall(secrets.token_bytes(32))

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lie, args=(theirs,))
    thread.start()
    with pytest.raises(OtherKey):
        SPOKEN.call(ours, KEY, time.monotonic() + 5)
    thread.join(10)
    ours.close()
    theirs.close()


def test_strangers_hold_up_nobody_and_are_counted() -> None:
    served: list[bytes] = []

    def serve(line: socket.socket) -> None:
        with line:
            served.append(line.recv(5))
            line.sendall(b"ended")

    door = socket.create_server(("127.0.0.1", 0))
    address = door.getsockname()
    lines: list[socket.socket] = []
    with Listener(door, SPOKEN, KEY, serve, most=8, of_one=4) as listener:
        for number in range(12):  # silent, and some that talk nonsense
            line = socket.create_connection(address, 5)
            lines.append(line)
            if number % 2:
                line.sendall(secrets.token_bytes(200))
        with socket.create_connection(address, 5) as line:
            SPOKEN.call(line, KEY, time.monotonic() + 5)
            line.sendall(b"hello")
            assert line.recv(5) == b"ended"
        end = time.monotonic() + 30
        while listener.refused < 8 and time.monotonic() < end:
            time.sleep(0.01)
        assert served == [b"hello"] and 8 <= listener.refused <= 12
    for line in lines:
        line.close()
