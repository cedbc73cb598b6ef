"""Output on its way to a launcher that reads slowly, not at all, or has no room left."""

from __future__ import annotations

import random
import re
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fivefold.launch.node_messages import FRAMES, WINDOW_BYTES, Kind, weight
from fivefold.launch.outbox import Outbox
from fivefold.wire import Channel, Message


class Pair:
    """An outbox, and the launcher's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, "the launcher", FRAMES, queues=True, timeout_s=10.0)
        self.launcher = Channel(theirs, "the agent", FRAMES, queues=True, timeout_s=10.0)
        self.outbox = Outbox(self.channel)

    def arrived(self) -> list[Message]:
        """What has come."""
        found: list[Message] = []
        while (message := self.launcher.receive(0.0)) is not None:
            found.append(message)
            self.channel.receive(0.0)  # sends what is queued
        return found

    def close(self) -> None:
        self.outbox.close()
        self.channel.close()
        self.launcher.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def output(pair: Pair, payload: bytes, **fields: Any) -> None:
    pair.outbox.put(Kind.OUTPUT, {"rank": 0, "stream": "out", **fields}, payload)


def test_no_more_than_the_window_is_under_way(pair: Pair) -> None:
    for _ in range(100):
        output(pair, bytes(1 << 15))
    came = sum(weight(bytes(message.payload)) for message in pair.arrived())
    assert WINDOW_BYTES <= came < WINDOW_BYTES + (1 << 15) + weight(b"")
    assert not pair.outbox.empty


@pytest.mark.parametrize("seed", range(4))
def test_all_arrives_in_order_whatever_has_to_wait(pair: Pair, seed: int) -> None:
    dice = random.Random(seed)
    sent: list[bytes] = []
    came: list[bytes] = []
    for number in range(600):
        if dice.random() < 0.1:
            pair.outbox.put(Kind.ENDED, {"rank": number, "code": 0})
            sent.append(b"%d" % number)
        else:
            sent.append(dice.randbytes(dice.choice([1, 100, 20_000, 1 << 16])))
            output(pair, sent[-1])
        if dice.random() < 0.05:
            came += taken(pair)
    while not pair.outbox.empty:
        came += taken(pair)
    came += taken(pair)
    assert came == sent


def taken(pair: Pair) -> list[bytes]:
    messages = pair.arrived()
    pair.outbox.taken(sum(weight(bytes(m.payload)) for m in messages if m.payload))
    return [bytes(m.payload) or b"%d" % m.fields["rank"] for m in messages]


def test_what_finds_no_room_is_told_and_ends_of_ranks_arrive(pair: Pair) -> None:
    for _ in range(40):
        output(
            pair, b"a" * (1 << 15)
        )  # the window, what is kept in memory, and some of it in a file
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # as on a full disk, writing fails
    try:
        output(pair, b"lost")
        output(pair, b"lost too")
        pair.outbox.put(Kind.ENDED, {"rank": 5, "code": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    output(pair, b"later")
    messages: list[Message] = []
    while not pair.outbox.empty:
        found = pair.arrived()
        pair.outbox.taken(sum(weight(bytes(m.payload)) for m in found if m.payload))
        messages += found
    messages += pair.arrived()
    assert [m.fields["rank"] for m in messages if m.kind == Kind.ENDED] == [5]
    text = b"".join(bytes(m.payload) for m in messages if m.kind == Kind.OUTPUT)
    told = b"(12 bytes of output are lost: no room for them on this node)\nlater"
    assert text == b"a" * (40 << 15) + told


def test_when_ranks_are_ended_the_end_of_their_output_comes_at_once(pair: Pair) -> None:
    for number in range(200):
        output(pair, b"%06d " % number + bytes((1 << 15) - 7))
        if number == 50:
            pair.outbox.put(Kind.ENDED, {"rank": 5, "code": 1})
    pair.outbox.shorten()
    came: list[bytes] = []
    while not pair.outbox.empty:
        came += taken(pair)
    came += taken(pair)
    whole = b"".join(came)
    assert b"5" in came, "an end is no output"
    numbers = [int(text) for text in re.findall(rb"(\d{6}) \0", whole)]
    assert numbers == [0, 1, *range(200 - len(numbers) + 2, 200)] and len(numbers) < 40
    assert b"bytes of output are left out: they waited when" in whole
