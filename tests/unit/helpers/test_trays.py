"""Trays: free again when nobody views them, and never written by a helper that was given up."""

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
from fivefold.data.remote.parcel import pack, unpack
from fivefold.helpers.trays import Borrowed, Tray, Trays, set_of

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")

# Holds a slot in the middle of writing a tray, until it is killed.
WRITER = """
import sys, time
from fivefold.helpers.trays import Borrowed
class Stuck:
    def __len__(self):
        print("writing", flush=True)
        time.sleep(60)
Borrowed.attach(int(sys.argv[1]), 1000, 2).write(int(sys.argv[2]), [Stuck()])
"""


@pytest.fixture
def trays() -> Iterator[Trays]:
    with Trays(1000, 2) as made:
        yield made


def taken(trays: Trays) -> Tray:
    tray = trays.take()
    assert tray is not None
    return tray


def test_a_tray_is_aligned_writable_and_as_large_as_it_was_ordered(trays: Trays) -> None:
    one, other = taken(trays), taken(trays)
    for tray in (one, other):
        assert (len(tray.memory), tray.memory.readonly, tray.memory.format) == (1000, False, "B")
        assert np.frombuffer(tray.memory, np.uint8).ctypes.data % 64 == 0
    one.memory[:] = b"a" * 1000
    other.memory[:] = b"b" * 1000
    assert bytes(one.memory) == b"a" * 1000
    assert trays.take() is None
    assert trays.free == 0


def test_a_tray_is_free_when_the_last_tensor_that_views_it_is_gone(trays: Trays) -> None:
    batch = (torch.arange(20.0).view(4, 5), [np.arange(3), torch.ones(2, dtype=torch.bfloat16)])
    told, parts = pack(batch)
    tray = taken(trays)
    data = b"".join(parts)
    tray.memory[: len(data)] = data
    (images, (numbers, _)) = unpack(told, tray.memory[: len(data)])
    number = tray.number
    del tray
    row, few = images[2].view(5, 1), numbers[1:]
    del images, numbers, _
    assert trays.free == 1
    assert row.flatten().tolist() == [10, 11, 12, 13, 14]
    del row
    assert trays.free == 1
    assert trays.memory(number) is not None
    del few
    assert trays.free == 2
    assert trays.memory(number) is None


def test_numbers_are_used_once_and_name_their_set(trays: Trays) -> None:
    with Trays(10, 1) as others:
        numbers = {taken(trays).number for _ in range(5)} | {taken(others).number for _ in range(5)}
        assert len(numbers) == 10
        assert {set_of(number) for number in numbers} == {trays.id, others.id}
        assert all(0 <= number < 1 << 62 for number in numbers)


def test_a_cycle_of_references_holds_a_tray_until_it_is_collected(trays: Trays) -> None:
    cycle: list[object] = [taken(trays)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert trays.free == 2


def test_tensors_outlive_the_trays() -> None:
    trays = Trays(1000, 1)
    tray = taken(trays)
    tray.memory[:3] = b"abc"
    tensor = torch.frombuffer(tray.memory, dtype=torch.uint8)
    trays.close()
    trays.close()
    del tray
    assert tensor[:3].tolist() == [97, 98, 99]
    assert trays.take() is None


def test_a_helper_writes_into_the_tray_it_was_given_and_no_other(trays: Trays) -> None:
    with Borrowed.attach(trays.segment.fd, 1000, 2) as borrowed:
        tray = taken(trays)
        assert borrowed.write(tray.number, [b"abc", b"", memoryview(b"de")])
        assert bytes(tray.memory[:5]) == b"abcde"
        old = tray.number
        del tray
        assert trays.free == 2
        again = taken(trays)  # the same memory, for another lease
        again.memory[:5] = b"other"
        assert not borrowed.write(old, [b"too late"])
        assert bytes(again.memory[:5]) == b"other"
        assert not borrowed.write(again.number ^ 0xFFF, [b"no such tray"])


def test_a_tray_that_is_being_written_when_given_up_is_free_once_its_writer_is_killed(
    trays: Trays,
) -> None:
    tray, other = taken(trays), taken(trays)
    fd = os.dup(trays.segment.fd)
    os.set_inheritable(fd, True)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd), str(tray.number)],
        stdout=subprocess.PIPE,
        text=True,
        close_fds=False,
    ) as writer:
        os.close(fd)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        del tray
        assert trays.take() is None  # given up, but nobody else's yet
        writer.kill()
    assert taken(trays).number != other.number


@pytest.mark.parametrize("size_bytes", [1, 4096, 100_000])
def test_what_is_no_trays_is_refused(size_bytes: int) -> None:
    with Segment.create("test", size_bytes) as segment:
        for tray_bytes, count in (
            (1000, 2000),
            (1 << 40, 1),
            (10, 0),
            (10, -1),
            (10, 1 << 20),
            (-1, 1),
        ):
            with pytest.raises(ArenaError, match="too small"):
                Borrowed.attach(segment.fd, tray_bytes, count)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        with pytest.raises(ArenaError, match="no memory file"):
            Borrowed.attach(null, 10, 1)
    finally:
        os.close(null)


def test_trays_smaller_than_told_are_refused(trays: Trays) -> None:
    with pytest.raises(ArenaError, match="smaller trays"):
        Borrowed.attach(trays.segment.fd, trays.segment.size_bytes - 4096 - 64, 1)
