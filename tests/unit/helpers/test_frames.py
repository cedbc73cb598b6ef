"""Messages on a line, in pieces, damaged, cut off, or made by a peer gone wrong."""

from __future__ import annotations

import math
import os
import random
import select
import socket
import time
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.helpers.messages import FRAMES, Kind, fresh
from fivefold.helpers.stream_link import StreamLink
from fivefold.wire.frames import (
    HEADER_BYTES,
    MOST_FIELDS_BYTES,
    MOST_PAYLOAD_BYTES,
    LinkClosed,
    LinkError,
    Message,
)
from fivefold.wire.reader import MessageReader, no_place
from frames import framed, heard, link, sealed, spoilt

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
tolds = st.dictionaries(st.text(), json_values, max_size=4)
frames = st.tuples(st.sampled_from(Kind), tolds, st.binary(max_size=300))


def arrived(data: bytes, cuts: list[int]) -> list[Message]:
    """What an arrival makes of bytes that come in pieces of so many bytes, over and over."""
    arrival, messages, at = MessageReader(FRAMES, no_place), [], 0
    while at < len(data):
        size = min(cuts[at % len(cuts)], len(arrival.room), len(data) - at)
        arrival.room[:size] = data[at : at + size]
        at += size
        if (message := arrival.took(size)) is not None:
            messages.append(message)
    assert not arrival.begun
    return messages


@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 200), min_size=1, max_size=5))
def test_messages_come_out_as_they_went_in_whatever_the_pieces(
    sent: list[tuple[Kind, dict[str, Any], bytes]], cuts: list[int]
) -> None:
    got = arrived(b"".join(framed(*frame) for frame in sent), cuts)
    assert [(m.kind, m.fields, bytes(m.payload)) for m in got] == sent


@given(st.data())
def test_one_flipped_bit_costs_its_message_or_the_link_and_never_gives_a_wrong_one(
    data: st.DataObject,
) -> None:
    first = framed(Kind.DONE, {"lease": 7}, b"payload " * 5)
    second = framed(Kind.DONE, {"lease": 8}, b"other")
    bit = data.draw(st.integers(0, 8 * len(first) - 1))
    spoiled = bytearray(first)
    spoiled[bit // 8] ^= 1 << bit % 8
    found = heard(bytes(spoiled) + second)
    if bit // 8 < HEADER_BYTES:
        assert not found.messages and not found.damaged
        assert "no message of fivefold" in found.ended
        return
    assert [message.fields for message in found.messages] == [{"lease": 8}]
    (problem,) = found.damaged
    in_payload = bit // 8 >= len(first) - 40
    assert (problem.kind, problem.fields) == (
        (Kind.DONE, {"lease": 7}) if in_payload else (None, {})
    )
    assert found.ended == "lost the peer: it hung up"


@given(st.integers(0, 200))
def test_a_message_that_is_cut_off_ends_the_link(length: int) -> None:
    whole = framed(Kind.DONE, {"lease": 7}, b"x" * 200)
    found = heard(whole[:length])
    assert not found.messages and not found.damaged
    assert found.ended.endswith("in the middle of a message" if length else "it hung up")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (sealed(b"{}", fields_bytes=MOST_FIELDS_BYTES + 1), "1048577 bytes of text"),
        (sealed(b"{}", payload_bytes=MOST_PAYLOAD_BYTES + 1), "payload of"),
        (sealed(b"{}", payload_bytes=(1 << 64) - 1), "payload of"),
        (b"GET / HTTP/1.1\r\nHost: dpu01:21001\r\nAccept: */*\r\n\r\n", "no message of fivefold"),
    ],
    ids=["told", "payload", "more", "browser"],
)
def test_lengths_beyond_the_limits_end_the_link(data: bytes, why: str) -> None:
    found = heard(data + framed(Kind.BYE, {}))
    assert not found.messages
    assert why in found.ended


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 9999]
)
def test_what_is_no_object_costs_its_message_only(text: bytes) -> None:
    found = heard(sealed(text, b"payload") + framed(Kind.BYE, {"why": "end"}))
    assert [message.kind for message in found.messages] == [Kind.BYE]
    assert len(found.damaged) == 1


def test_an_unknown_kind_costs_its_message_only() -> None:
    found = heard(sealed(b"{}", b"payload", kind=99) + framed(Kind.BYE, {}))
    assert [message.kind for message in found.messages] == [Kind.BYE]


@pytest.mark.parametrize("arena", [False, True])
def test_a_payload_in_a_tray_that_was_never_lent_costs_its_message_only(arena: bool) -> None:
    data = sealed(b'{"lease":3}', buffer=5, payload_bytes=100, kind=Kind.DONE)
    found = heard(data + framed(Kind.BYE, {}), arena=arena)
    assert [message.kind for message in found.messages] == [Kind.BYE]
    assert found.damaged[0].fields == {"lease": 3}


def test_what_cannot_be_told_is_refused_and_the_link_goes_on() -> None:
    with link() as (made, peer):
        for fields in ({"x": object()}, {"x": "a" * MOST_FIELDS_BYTES}, {"x": 10**5000}):
            with pytest.raises(LinkError):
                made.send(Kind.DONE, fields)
        made.send(Kind.BYE, {"why": math.inf})
        assert peer.recv(1000) == framed(Kind.BYE, {"why": math.inf})


def test_a_payload_is_received_where_it_was_placed_and_a_damaged_one_too() -> None:
    whole = bytearray(framed(Kind.DONE, {"lease": 1}, b"abcd"))
    whole[-1] ^= 1
    buffer = bytearray(8)
    asked = []

    def place(kind: Kind, fields: dict[str, Any], size: int) -> memoryview:
        asked.append((kind, fields, size))
        return memoryview(buffer)

    with link() as (made, peer):
        made.place = place
        peer.sendall(whole + framed(Kind.DONE, {"lease": 2}, b"efgh"))
        with pytest.raises(LinkError, match="payload of a message DONE was damaged") as caught:
            made.receive(1.0)
        assert caught.value.fields == {"lease": 1}
        message = made.receive(1.0)
    assert message is not None and message.payload.obj is buffer
    assert buffer == b"efgh\0\0\0\0"
    assert asked == [(Kind.DONE, {"lease": 1}, 4), (Kind.DONE, {"lease": 2}, 4)]


def test_a_place_that_is_too_small_is_not_used() -> None:
    with link() as (made, peer):
        made.place = lambda _kind, _fields, size: memoryview(bytearray(size - 1))
        peer.sendall(framed(Kind.DONE, {}, b"abcd"))
        message = made.receive(1.0)
    assert message is not None and bytes(message.payload) == b"abcd"


@pytest.mark.parametrize("size", [0, 1, 100])
def test_fresh_memory_is_aligned_and_writable(size: int) -> None:
    room = fresh(size)
    assert len(room) == size and not room.readonly
    with pytest.raises(LinkClosed, match="is the most"):
        fresh(MOST_PAYLOAD_BYTES + 1)


def test_nothing_within_the_time_is_none() -> None:
    with link() as (made, peer):
        begun = time.monotonic()
        assert made.receive(0.0) is None
        assert made.receive(0.05) is None
        assert 0.05 <= time.monotonic() - begun < 5.0
        peer.sendall(framed(Kind.BYE, {})[:20])
        assert made.receive(0.01) is None


def test_what_had_come_is_given_before_the_end_even_if_sending_failed() -> None:
    with link() as (made, peer):
        peer.sendall(framed(Kind.BYE, {"why": "the job has ended"}))
        peer.close()
        with pytest.raises(LinkClosed, match="lost the peer: Broken pipe"):
            made.send(Kind.DONE, {})
        message = made.receive(1.0)
        assert message is not None and message.fields == {"why": "the job has ended"}
        with pytest.raises(LinkClosed, match="not connected any more"):
            made.receive(1.0)
        assert made.fileno() >= 0
    assert made.fileno() == -1
    made.close()
    with pytest.raises(LinkClosed, match="not connected any more: Broken pipe"):
        made.receive(1.0)


@pytest.mark.parametrize("queues", [False, True])
def test_a_peer_that_reads_nothing_is_given_up(queues: bool) -> None:
    def send_on() -> None:
        while True:
            made.send(Kind.WEIGHTS, {}, [payload])
            if queues:
                time.sleep(0.25)

    payload = bytes(1 << 20)
    with (
        link(queues=queues, timeout_s=0.2) as (made, _),
        pytest.raises(LinkClosed, match="read nothing for"),
    ):
        send_on()


def test_sending_never_waits_where_it_queues_and_goes_on_when_there_is_room() -> None:
    parts = [bytes([n]) * (3 << 20) for n in range(8)]
    with link(queues=True) as (made, peer):
        begun = time.monotonic()
        made.send(Kind.WEIGHTS, {"version": 1}, parts)
        made.send(Kind.BYE, {})
        assert time.monotonic() - begun < 5.0
        whole = FRAMES.packed(Kind.WEIGHTS, {"version": 1}, parts)[0] + b"".join(parts)
        got = bytearray()
        while len(got) < len(whole):
            got += peer.recv(1 << 20)
            assert made.receive(0.0) is None
        assert got[: len(whole)] == whole
    assert FRAMES.packed(Kind.BYE, {})[0].startswith(got[len(whole) :])


def test_a_corrupt_message_does_not_leave_its_descriptors_open() -> None:
    before = psutil.Process().num_fds()
    bad = bytearray(framed(Kind.POOL, {"set": 1, "tray_bytes": 64, "count": 2}))
    bad[-1] ^= 1
    for data in (
        bytes(bad),
        framed(Kind.BYE, {}),
        framed(Kind.POOL, {"set": "x"}),
        b"nonsense" * 9,
    ):
        fd = os.open(os.devnull, os.O_RDONLY)
        try:
            heard(data, arena=True, fds=[fd])
        finally:
            os.close(fd)
    assert psutil.Process().num_fds() == before


def fuzz(count: int, seed: int) -> None:
    dice = random.Random(seed)
    process = psutil.Process()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for number in range(count):
        data, fds = spoilt(dice)
        begun = time.monotonic()
        try:
            found = heard(data, arena=number % 2 == 0, fds=fds)
        finally:
            for fd in fds:
                os.close(fd)
        assert found.ended, (seed, number)
        assert time.monotonic() - begun < 10.0, (seed, number)
        if number % 500 == 0:
            assert process.memory_info().rss - memory < 200 << 20, (seed, number)
    assert process.num_fds() == descriptors


@pytest.mark.filterwarnings("ignore:memory of the peer cannot be used")
def test_2000_spoilt_frames_do_no_harm() -> None:
    fuzz(2_000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:memory of the peer cannot be used")
def test_100000_spoilt_frames_do_no_harm() -> None:
    fuzz(100_000, seed=2)


def test_descriptors_beyond_one_are_the_kernels_to_close() -> None:
    before = psutil.Process().num_fds()
    with link(arena=True) as (made, peer):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
        socket.send_fds(peer, [framed(Kind.BYE, {})], fds)
        for fd in fds:
            os.close(fd)
        assert made.receive(1.0) is not None
    assert psutil.Process().num_fds() == before


def test_pieces_of_a_large_payload_over_tcp_do_not_each_wake_the_receiver() -> None:
    data = framed(Kind.DONE, {}, bytes(1 << 22))
    with socket.create_server(("127.0.0.1", 0)) as door:
        theirs = socket.create_connection(door.getsockname())
        with theirs, StreamLink(door.accept()[0], "the peer", queues=True) as made:
            woken, found = 0, None
            for start in range(0, len(data), 1 << 16):
                theirs.sendall(data[start : start + (1 << 16)])
                if select.select([made], [], [], 0.005)[0]:
                    woken += 1
                    found = made.receive(0.0)
            found = found or made.receive(10.0)
    assert found is not None and found.payload == data[-(1 << 22) :]
    assert woken < 32, "of 65 pieces"
