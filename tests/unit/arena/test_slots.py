"""Slots: taken, held by several, dropped, and freed when a holder is killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fivefold.arena import ArenaError, Segment, Slots
from fivefold.arena.native import problem

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")

# Takes slots of a segment that it inherits, tells so, and waits to be killed.
HOLDER = """
import os, sys, time
from fivefold.arena import Segment, Slots
slots = Slots.attach(Segment.attach(int(sys.argv[1])), 3)
slots.hold(0)
slots.view(slots.take(1)).raw = b"x" * slots.slot_bytes
print("holds", flush=True)
time.sleep(60)
"""


def test_a_slot_is_free_when_its_last_holder_drops_it() -> None:
    with Slots.create("test", 100, 2) as one:
        with Slots.attach(Segment.attach(os.dup(one.segment.fd)), 2) as other:
            assert other.slot_bytes == one.slot_bytes == 4096
            slot = one.take(1)
            one.view(slot)[:3] = b"abc"
            other.hold(slot)
            one.drop(slot)
            one.drop(slot)
            assert (one.held(slot), other.view(slot)[:3]) == (1, b"abc")
            assert one.take(1) != slot
            with pytest.raises(ArenaError, match=r"all 2 slots were held for 0\.0 s"):
                one.take(0.01)
            other.drop(slot)
            assert one.take(1) == slot
        assert one.holders() == [os.getpid()]
        one.drop(slot)
        with pytest.raises(ArenaError, match="dropped by all"):
            one.hold(slot)


def test_what_a_killed_process_held_is_free_again() -> None:
    with Slots.create("test", 4096, 3) as slots:
        own = slots.take(1)
        assert own == 0
        fd = os.dup(slots.segment.fd)
        os.set_inheritable(fd, True)
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(fd)],
            stdout=subprocess.PIPE,
            text=True,
            close_fds=False,
        ) as holder:
            os.close(fd)
            assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
            assert [slots.held(slot) for slot in range(3)] == [2, 1, 0]
            assert sorted(slots.holders()) == sorted([os.getpid(), holder.pid])
            last = slots.take(1)
            holder.kill()
            holder.wait()
            assert slots.take(1) not in (own, last)
            assert slots.held(own) == 1 and slots.holders() == [os.getpid()]


def test_the_sixty_fifth_holder_is_refused() -> None:
    with Slots.create("test", 4096, 1) as slots:
        others = [Slots.attach(Segment.attach(os.dup(slots.segment.fd)), 1) for _ in range(63)]
        extra = Segment.attach(os.dup(slots.segment.fd))
        with pytest.raises(ArenaError, match="64 processes"):
            Slots.attach(extra, 1)
        extra.close()
        for other in others:
            other.close()
