"""What every link has to do, whatever carries it: checks for a trainer, and the helper that answers them."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from fivefold.data.windows import Box
from fivefold.helpers.decode import decode
from fivefold.helpers.encode import encode, types_in
from fivefold.helpers.link import Link
from fivefold.helpers.messages import Kind
from fivefold.helpers.receive_buffers import BufferPool, ReceiveBuffer
from fivefold.wire.frames import LinkClosed, LinkError, Message
from fivefold.wire.reader import no_place

__all__ = ["CHECKS", "LIMIT_S", "Ends", "made", "results", "serve"]

LIMIT_S = 30.0
MIB = 1 << 20


class Pair(NamedTuple):
    image: Any
    label: Any


def made(size: int, seed: int = 0) -> bytes:
    """What both sides make of the same numbers."""
    return np.random.default_rng(seed).bytes(size)


def batch(number: int) -> Any:
    """Batches as users have them."""
    dice = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (8, 3, 17, 19), generator=dice, dtype=torch.uint8)
    return [
        (images, torch.arange(8)),
        {"image": images.float().to(memory_format=torch.channels_last), "name": ["a", "ü"] * 4},
        Pair((images[..., 2:5, 1:9], Box((17, 19), (range(2, 5), range(1, 9)))), [None] * 8),
        OrderedDict(half=images.bfloat16(), mask=images > 7, array=np.arange(6).reshape(2, 3).T),
        (torch.empty(0, 3, 4), torch.tensor(3), float("nan"), b"raw", 1 << 80),
    ][number]


# ---- the helper


def serve(link: Link) -> None:
    """Answer leases until the trainer says goodbye or is gone."""
    while True:
        try:
            message = link.receive(LIMIT_S)
        except LinkError:
            continue
        except LinkClosed:
            return
        if message is None or message.kind is Kind.BYE:
            return
        try:
            _ANSWERS[message.fields["do"]](link, message)
        except LinkClosed:
            return


def _make(link: Link, message: Message) -> None:
    """Bytes, in parts of odd sizes."""
    fields = message.fields
    time.sleep(fields.get("pause_s", 0.0))
    data = memoryview(made(fields["size"], fields["seed"]))
    parts = [data[:1], data[1:1], data[1:64], data[64:]]
    answer = {"lease": fields["lease"]}
    link.send(Kind.DONE, answer, [part for part in parts if part], buffer=fields.get("buffer", -1))


def _batch(link: Link, message: Message) -> None:
    fields = message.fields
    text, parts = encode(batch(fields["number"]))
    link.send(Kind.DONE, {"lease": fields["lease"], **text}, parts, buffer=fields["buffer"])


def _many(link: Link, message: Message) -> None:
    for number in range(message.fields["count"]):
        link.send(Kind.DONE, {"lease": number}, [made(number % 300)])


def _digest(link: Link, message: Message) -> None:
    digest = xxhash.xxh3_64_hexdigest(message.payload)
    link.send(Kind.DONE, {"lease": message.fields["lease"], "digest": digest})


def _sleep(link: Link, message: Message) -> None:
    time.sleep(message.fields["s"])


def _close(link: Link, message: Message) -> None:
    link.close()


def _die(link: Link, message: Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_ANSWERS = {
    "make": _make, "batch": _batch, "many": _many, "digest": _digest, "sleep": _sleep,
    "close": _close, "die": _die,
}  # fmt: skip


# ---- the trainer


@dataclass
class Ends:
    """A trainer's end, and its buffers: what a check gets."""

    link: Link
    pool: BufferPool

    def ask(self, **fields: Any) -> None:
        """A lease."""
        self.link.send(Kind.LEASE, {"lease": 0, **fields})

    def answer(self, limit_s: float = LIMIT_S) -> Message:
        """The next message."""
        message = self.link.receive(limit_s)
        assert message is not None, f"nothing within {limit_s:g} s"
        return message

    def buffer(self) -> ReceiveBuffer:
        """A buffer, in which the next payloads lie."""
        buffer = self.pool.take()
        assert buffer is not None
        self.link.place = lambda _kind, _fields, size: (
            buffer.memory if size <= len(buffer.memory) else None
        )
        return buffer


def check_messages_arrive_in_order(ends: Ends) -> None:
    ends.ask(do="many", count=500)
    for number in range(500):
        message = ends.answer()
        assert message.fields == {"lease": number}
        assert bytes(message.payload) == made(number % 300)


SIZES = (0, 1, 47, 48, 63, 64, 65, 4096, 65_535, MIB + 1, 64 * MIB)


def check_payloads_of_all_sizes_lie_in_their_buffer(ends: Ends) -> None:
    for seed, size in enumerate(SIZES):
        buffer = ends.buffer()
        ends.ask(do="make", size=size, seed=seed, lease=seed, buffer=buffer.number)
        message = ends.answer()
        assert message.fields == {"lease": seed}
        assert bytes(message.payload) == made(size, seed)
        assert bytes(buffer.memory[:size]) == message.payload
        if size:
            message.payload[0] ^= 255
            assert buffer.memory[0] == message.payload[0]


def check_what_is_larger_than_a_tray_comes_all_the_same(ends: Ends) -> None:
    for _ in range(2):
        with BufferPool(MIB, 1) as small:
            ends.link.share(small)
            other = Ends(ends.link, small)
            buffer = other.buffer()
            buffer.memory[:4] = b"keep"
            for size in (MIB + 1, MIB):
                other.ask(do="make", size=size, seed=1, buffer=buffer.number)
                assert bytes(other.answer().payload) == made(size, 1)
                assert (bytes(buffer.memory[:4]) == b"keep") == (size > MIB)


def check_batches_arrive_byte_for_byte(ends: Ends) -> None:
    for number in range(5):
        ours, buffer = batch(number), ends.buffer()
        ends.ask(do="batch", number=number, buffer=buffer.number)
        message = ends.answer()
        theirs = decode(message.fields, message.payload, types_in(ours))
        assert encode(theirs).digest() == encode(ours).digest()


def check_a_tray_is_held_by_what_the_user_keeps(ends: Ends) -> None:
    free = ends.pool.free
    buffer = ends.buffer()
    ends.ask(do="batch", number=0, buffer=buffer.number)
    message = ends.answer()
    images, _ = decode(message.fields, message.payload)
    ends.link.place = no_place
    del message, buffer, _
    row = images[0, 0, 3]
    expected = row.clone()
    del images
    assert ends.pool.free == free - 1
    others = [ends.pool.take() for _ in range(ends.pool.count - 1)]
    assert None not in others and ends.pool.take() is None
    assert torch.equal(row, expected)
    del row, others
    assert ends.pool.free == free


def check_a_late_answer_leaves_the_next_lease_alone(ends: Ends) -> None:
    buffer = ends.pool.take()
    assert buffer is not None
    ends.ask(do="make", size=100, seed=1, lease=1, pause_s=0.3, buffer=buffer.number)
    address = np.frombuffer(buffer.memory, np.uint8).ctypes.data
    ends.link.place = no_place
    del buffer  # lost: nobody waits for this lease any more
    again = ends.pool.take()
    assert again is not None and np.frombuffer(again.memory, np.uint8).ctypes.data == address
    again.memory[:100] = b"n" * 100
    try:
        assert ends.answer().fields == {"lease": 1}
    except LinkError as problem:
        assert problem.fields == {"lease": 1}  # noqa: PT017
    assert bytes(again.memory[:100]) == b"n" * 100
    ends.ask(do="make", size=10, seed=2, lease=2, buffer=again.number)
    assert ends.answer().fields == {"lease": 2}


def check_sending_does_not_wait_for_a_peer_that_does_not_read(ends: Ends) -> None:
    weights = made(16 * MIB, 3)
    ends.ask(do="sleep", s=0.5)
    begun = time.monotonic()
    ends.link.send(Kind.WEIGHTS, {"do": "digest", "lease": 3}, [weights])
    assert time.monotonic() - begun < 0.4
    assert ends.link.receive(0.0) is None
    assert ends.answer().fields == {"lease": 3, "digest": xxhash.xxh3_64_hexdigest(weights)}


def check_both_may_send_much_at_the_same_time(ends: Ends) -> None:
    weights = made(16 * MIB, 4)
    ends.ask(do="make", size=16 * MIB, seed=5, lease=5)
    ends.link.send(Kind.WEIGHTS, {"do": "digest", "lease": 6}, [weights[:MIB], weights[MIB:]])
    message = ends.answer()
    assert message.fields == {"lease": 5} and bytes(message.payload) == made(16 * MIB, 5)
    assert ends.answer().fields == {"lease": 6, "digest": xxhash.xxh3_64_hexdigest(weights)}


def check_waiting_ends(ends: Ends) -> None:
    begun = time.monotonic()
    assert ends.link.receive(0.0) is None
    assert ends.link.receive(0.05) is None
    assert 0.05 <= time.monotonic() - begun < 5.0


def check_a_peer_says_what_it_is(ends: Ends) -> None:
    assert ends.link.hello["versions"]["torch"] == version("torch")
    assert ends.link.hello["pid"] > 0


def check_a_peer_that_hangs_up_is_noticed(ends: Ends) -> None:
    """Comes last."""
    ends.ask(do="close")
    try:
        raise AssertionError(ends.link.receive(LIMIT_S))
    except LinkClosed as problem:
        assert "hung up" in str(problem)  # noqa: PT017
    try:
        ends.ask(do="make", size=1, seed=1)
        raise AssertionError("it was sent")
    except LinkClosed:
        pass


CHECKS: dict[str, Callable[[Ends], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def results(link: Link) -> dict[str, str]:
    """How each check ended: empty, or its traceback."""
    found: dict[str, str] = {}
    with BufferPool(64 * MIB, 3) as pool:
        link.share(pool)
        for name, check in CHECKS.items():
            link.place = no_place
            try:
                check(Ends(link, pool))
                found[name] = ""
            except Exception:  # noqa: BLE001 - told to the test
                found[name] = traceback.format_exc()
    return found
