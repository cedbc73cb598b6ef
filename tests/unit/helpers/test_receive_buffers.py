"""Buffers: free again when nobody views them, and never written by a helper that was given up."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fivefold.arena.native import ArenaError, problem
from fivefold.arena.segment import Segment
from fivefold.helpers.decode import decode
from fivefold.helpers.encode import encode
from fivefold.helpers.receive_buffers import AttachedPool, BufferPool, ReceiveBuffer, pool_of

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")

# Holds a slot in the middle of writing a buffer, until it is killed.
WRITER = """
import sys, time
from fivefold.helpers.receive_buffers import AttachedPool
class Stuck:
    def __len__(self):
        print("writing", flush=True)
        time.sleep(60)
AttachedPool.attach(int(sys.argv[1]), 1000, 2).write(int(sys.argv[2]), [Stuck()])
"""


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(1000, 2) as made:
        yield made


def taken(pool: BufferPool) -> ReceiveBuffer:
    buffer = pool.take()
    assert buffer is not None
    return buffer


def test_a_buffer_is_aligned_writable_and_as_large_as_it_was_ordered(pool: BufferPool) -> None:
    one, other = taken(pool), taken(pool)
    for buffer in (one, other):
        assert (len(buffer.memory), buffer.memory.readonly, buffer.memory.format) == (
            1000,
            False,
            "B",
        )
        assert np.frombuffer(buffer.memory, np.uint8).ctypes.data % 64 == 0
    one.memory[:] = b"a" * 1000
    other.memory[:] = b"b" * 1000
    assert bytes(one.memory) == b"a" * 1000
    assert pool.take() is None
    assert pool.free == 0


def test_a_buffer_is_free_when_the_last_tensor_that_views_it_is_gone(pool: BufferPool) -> None:
    batch = (torch.arange(20.0).view(4, 5), [np.arange(3), torch.ones(2, dtype=torch.bfloat16)])
    fields, parts = encode(batch)
    buffer = taken(pool)
    data = b"".join(parts)
    buffer.memory[: len(data)] = data
    (images, (numbers, _)) = decode(fields, buffer.memory[: len(data)])
    number = buffer.number
    del buffer
    row, few = images[2].view(5, 1), numbers[1:]
    del images, numbers, _
    assert pool.free == 1
    assert row.flatten().tolist() == [10, 11, 12, 13, 14]
    del row
    assert pool.free == 1
    assert pool.memory(number) is not None
    del few
    assert pool.free == 2
    assert pool.memory(number) is None


def test_numbers_are_used_once_and_name_their_set(pool: BufferPool) -> None:
    with BufferPool(10, 1) as others:
        numbers = {taken(pool).number for _ in range(5)} | {taken(others).number for _ in range(5)}
        assert len(numbers) == 10
        assert {pool_of(number) for number in numbers} == {pool.id, others.id}
        assert all(0 <= number < 1 << 62 for number in numbers)


def test_a_cycle_of_references_holds_a_tray_until_it_is_collected(pool: BufferPool) -> None:
    cycle: list[object] = [taken(pool)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.free == 2


def test_tensors_outlive_the_buffers() -> None:
    pool = BufferPool(1000, 1)
    buffer = taken(pool)
    buffer.memory[:3] = b"abc"
    tensor = torch.frombuffer(buffer.memory, dtype=torch.uint8)
    pool.close()
    pool.close()
    del buffer
    assert tensor[:3].tolist() == [97, 98, 99]
    assert pool.take() is None


def test_a_helper_writes_into_the_tray_it_was_given_and_no_other(pool: BufferPool) -> None:
    with AttachedPool.attach(pool.segment.fd, 1000, 2) as attached:
        buffer = taken(pool)
        assert attached.write(buffer.number, [b"abc", b"", memoryview(b"de")])
        assert bytes(buffer.memory[:5]) == b"abcde"
        old = buffer.number
        del buffer
        assert pool.free == 2
        again = taken(pool)  # the same memory, for another lease
        again.memory[:5] = b"other"
        assert not attached.write(old, [b"too late"])
        assert bytes(again.memory[:5]) == b"other"
        assert not attached.write(again.number ^ 0xFFF, [b"no such buffer"])


def test_a_buffer_that_is_being_written_when_given_up_is_free_once_its_writer_is_killed(
    pool: BufferPool,
) -> None:
    buffer, other = taken(pool), taken(pool)
    fd = os.dup(pool.segment.fd)
    os.set_inheritable(fd, True)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd), str(buffer.number)],
        stdout=subprocess.PIPE,
        text=True,
        close_fds=False,
    ) as writer:
        os.close(fd)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        del buffer
        assert pool.take() is None  # given up, but nobody else's yet
        writer.kill()
    assert taken(pool).number != other.number


@pytest.mark.parametrize("size_bytes", [1, 4096, 100_000])
def test_what_is_no_buffers_is_refused(size_bytes: int) -> None:
    with Segment.create("test", size_bytes) as segment:
        for buffer_bytes, count in (
            (1000, 2000),
            (1 << 40, 1),
            (10, 0),
            (10, -1),
            (10, 1 << 20),
            (-1, 1),
        ):
            with pytest.raises(ArenaError, match="too small"):
                AttachedPool.attach(segment.fd, buffer_bytes, count)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        with pytest.raises(ArenaError, match="no memory file"):
            AttachedPool.attach(null, 10, 1)
    finally:
        os.close(null)


def test_buffers_smaller_than_told_are_refused(pool: BufferPool) -> None:
    with pytest.raises(ArenaError, match="smaller buffers"):
        AttachedPool.attach(pool.segment.fd, pool.segment.size_bytes - 4096 - 64, 1)
