"""Streams between nodes: who may open one, and what comes of damaged frames."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fivefold.arena.native import KINDS, problem
from fivefold.comm import streams
from fivefold.comm.core import Core, Spread
from fivefold.comm.operations import Operations
from fivefold.comm.own_arena import own_arena
from fivefold.errors import LaunchError
from fivefold.sections import Comm

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")
HEAD = struct.Struct("<IiQQQQ")


class Taken:
    """A group that keeps the streams that it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.sockets: list[socket.socket] = []
        self.came = threading.Condition()

    def accept(self, rank: int, lane: int, descriptor: int, tag: int) -> bool:
        with self.came:
            self.calls.append((rank, lane, tag))
            self.sockets.append(socket.socket(fileno=descriptor))
            self.came.notify_all()
        return True

    def wait(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.calls) >= count, 20)

    def close(self) -> None:
        for line in self.sockets:
            line.close()
        self.sockets.clear()


@pytest.fixture
def taken() -> Iterator[tuple[str, Taken]]:
    group, token = Taken(), streams.new_token()
    streams.expect(token, group)
    yield token, group
    streams.dismiss(token)
    group.close()


def test_a_stream_is_given_to_its_group(taken: tuple[str, Taken]) -> None:
    token, group = taken
    with socket.socket(
        fileno=streams.open_stream(streams.door(), token, 7, 1, -1, timeout_s=10)
    ) as line:
        group.wait(1)
        assert group.calls == [(7, 1, -1)]
        line.setblocking(True)
        line.sendall(b"word")
        group.sockets[0].setblocking(True)
        assert group.sockets[0].recv(4) == b"word"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_stream_may_go_to_an_address_of_ipv6(taken: tuple[str, Taken]) -> None:
    token, group = taken
    six = replace(streams.door(), hosts=["127.0.0.1", "::1"])
    with socket.socket(fileno=streams.open_stream(six, token, 7, 2, -1, timeout_s=10)):
        group.wait(1)
        assert group.calls == [(7, 2, -1)]


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(
        LaunchError, match=r"no interface ib7 with an address .* those that have one: .*lo"
    ):
        streams.configure(Comm(interfaces="lo,ib7"))


def test_who_knows_another_key_opens_nothing(taken: tuple[str, Taken]) -> None:
    token, group = taken
    other = replace(streams.door(), key="00" * 32)
    with pytest.raises(streams.StreamError, match="knows another key"):
        streams.open_stream(other, token, 0, 0, -1, timeout_s=10)
    assert not group.calls


def test_a_stream_to_a_group_that_is_left_ends() -> None:
    token = streams.new_token()
    streams.dismiss(token)
    with socket.socket(
        fileno=streams.open_stream(streams.door(), token, 0, 0, -1, timeout_s=10)
    ) as line:
        line.setblocking(True)
        line.settimeout(10)
        assert HEAD.unpack(line.recv(HEAD.size))[0] == 0xFFFFFF02
        assert line.recv(1) == b""


def test_nobody_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = streams.Door(["127.0.0.1"], int(free.getsockname()[1]), "00" * 32)
    begun = time.monotonic()
    with pytest.raises(streams.StreamError, match="refused"):
        streams.open_stream(nobody, streams.new_token(), 0, 0, -1, timeout_s=10)
    assert time.monotonic() - begun < 5


def test_another_program_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = streams.Door(["127.0.0.1"], int(other.getsockname()[1]), "00" * 32)

        def answer() -> None:
            line, _ = other.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(streams.StreamError, match="no process of Fivefold"):
            streams.open_stream(where, streams.new_token(), 0, 0, -1, timeout_s=10)
        answering.join()


def group_with_a_stranger(token: str, rails: int) -> tuple[Core, list[socket.socket]]:
    """Rank 0 of two on two nodes, and what rank 1 would send on: collectives, messages, further rails."""
    memory = Core.memory_for(1)
    door = streams.door()
    doors = [replace(door, hosts=[*door.hosts] * rails)] * 2
    spread = Spread(0, [0, 1], doors, token, [os.eventfd(0, os.EFD_NONBLOCK)])
    group = Core(0, 2, memory, [own_arena().segment], [-1], crowded=False, spread=spread)
    ends: list[socket.socket] = []
    for lane in range(1 + rails):
        here, there = socket.socketpair()
        here.setblocking(False)
        assert group.accept(1, lane, here.detach(), -1)
        ends.append(there)
    return group, ends


SMALL, LARGE = 4, 40_000
"""elements; the second ones of a tensor that takes two rails"""


def frames(draw: random.Random, elements: int) -> bytes:
    """Some that could be meant, changed here and there, or none at all."""
    made = bytearray()
    for number in range(draw.randint(1, 3)):
        kind = draw.choice([KINDS.index("all_reduce"), draw.getrandbits(8)])
        what = draw.choice([kind | 11 << 8, 11, draw.getrandbits(32), 0xFFFFFF01, 0xFFFFFF02])
        count = draw.choice([elements, elements, draw.getrandbits(64), draw.getrandbits(20)])
        length = draw.choice([4 * elements] * 2 + [0, draw.getrandbits(64), draw.getrandbits(10)])
        place = draw.choice([0, 0, 1 << 17, 4 * elements + 1, draw.getrandbits(64)])
        tag = draw.choice([0, draw.getrandbits(31)])
        made += HEAD.pack(what, tag, count, length, draw.choice([0, number]), place)
        made += bytes(min(length, draw.choice([4 * elements, 1 << 17, 64])))
    if draw.random() < 0.5:
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made[: draw.randint(1, len(made))])


def damaged(count: int, seed: int, token: str, rails: int = 1) -> int:
    """How many of so many groups were told of an error; of frames that were meant, none is."""
    elements = SMALL if rails == 1 else LARGE
    draw, errors = random.Random(seed), 0
    for _ in range(count):
        group, ends = group_with_a_stranger(token, rails)
        operations = Operations(group, 20.0)
        tensor = torch.ones(elements)
        acts: list[Any] = [
            lambda tensor=tensor, on=operations: on.all_reduce(tensor, 0, later=False),
            lambda tensor=tensor, on=operations: on.receive(tensor, 1, 0).wait(),
        ]
        lane = draw.randrange(len(ends))
        sent = {lane: frames(draw, elements)}
        if rails > 1 and draw.random() < 0.5:
            sent |= {0: frames(draw, elements), 2: frames(draw, elements)}
        sending = threading.Thread(target=_send_all, args=(ends, sent))
        sending.start()
        told = ""
        try:
            acts[lane % 2]()
        except RuntimeError as error:
            told = str(error)
        assert not told or "rank 0 of 2" in told
        errors += bool(told)
        operations.close()
        sending.join()
    return errors


def _send_all(ends: list[socket.socket], sent: dict[int, bytes]) -> None:
    """By lane, and no more; who has heard enough does not read on."""
    for lane, data in sent.items():
        with contextlib.suppress(OSError):
            ends[lane].settimeout(5)
            ends[lane].sendall(data)
    for end in ends:
        end.close()


@pytest.mark.parametrize("rails", [1, 2])
def test_damaged_frames_are_errors(taken: tuple[str, Taken], rails: int) -> None:
    count = 300 // rails**2
    assert count // 2 < damaged(count, rails, taken[0], rails) <= count


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_frames_are_errors(taken: tuple[str, Taken]) -> None:
    assert 50_000 < damaged(100_000, 2, taken[0]) <= 100_000
