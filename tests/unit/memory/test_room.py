"""Stretches of a store: nothing is given to two, and what is free again serves other sizes."""

from __future__ import annotations

import random
import threading

import pytest

from fivefold.parallel.memory.room import Room


@pytest.mark.parametrize("seed", range(20))
def test_no_address_is_taken_twice_and_all_come_back(seed: int) -> None:
    room, rng = Room(), random.Random(seed)
    chunks = [(first, first + rng.randint(1, 200)) for first in range(0, 3000, 1000)]
    for start, stop in chunks:
        room.give(start, stop - start)
    taken: dict[int, int] = {}
    for _ in range(400):
        size = rng.randint(1, 60)
        if taken and rng.random() < 0.5:
            start = rng.choice([*taken])
            room.give(start, taken.pop(start))
        elif (start := room.take(size)) is not None:
            own = set(range(start, start + size))
            assert any(first <= start and start + size <= stop for first, stop in chunks)
            assert not any(own & set(range(at, at + n)) for at, n in taken.items())
            taken[start] = size
    for start, size in taken.items():
        room.give(start, size)
    assert all(room.withdraw(*chunk) for chunk in chunks)
    assert room.take(1) is None


def test_neighbours_are_joined_and_the_smallest_that_is_enough_is_used() -> None:
    room = Room()
    room.give(0, 100)
    first, second, third = (room.take(30) for _ in range(3))
    assert (first, second, third) == (0, 30, 60)
    assert room.take(30) is None
    room.give(30, 30)
    room.give(0, 30)
    assert room.take(5) == 90, "of ten that are left, not of sixty"
    assert room.take(60) == 0


def test_what_is_taken_in_part_is_not_withdrawn() -> None:
    room = Room()
    room.give(0, 100)
    assert room.take(10) == 0
    assert not room.withdraw(0, 100)
    assert room.withdraw(40, 50)
    assert room.take(50) == 50, "what lies around it is free still"
    assert room.take(30) == 10


def test_several_threads_take_and_give() -> None:
    room, taken, lock = Room(), set[int](), threading.Lock()
    room.give(0, 64)

    def work() -> None:
        for _ in range(500):
            if (slot := room.take(8)) is not None:
                with lock:
                    assert slot not in taken
                    taken.add(slot)
                with lock:
                    taken.remove(slot)
                room.give(slot, 8)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert room.withdraw(0, 64)
