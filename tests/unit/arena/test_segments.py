"""Segments and gates: memory that is passed on, and is gone when nobody knows it any more."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.arena import (
    ArenaError,
    Gate,
    Heap,
    Segment,
    connect,
    limit_bytes,
    node_name,
)
from fivefold.arena.budget import available_bytes, in_turn
from fivefold.arena.native import problem

PAGE = 4096


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create("test", 16 * PAGE) as segment:
        yield segment


def memory_files() -> int:
    maps = Path("/proc/self/maps").read_text()
    held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum("fivefold-test" in name for name in [maps, *held])


def test_another_mapping_sees_what_is_written(segment: Segment) -> None:
    with Segment.attach(os.dup(segment.fd)) as other:
        segment.view(PAGE, 5).raw = b"hello"
        assert other.view(PAGE, 5).raw == b"hello"
        assert other.address != segment.address and other.size_bytes == segment.size_bytes


def test_nobody_can_change_its_size(segment: Segment) -> None:
    for size in (PAGE, 64 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


def test_it_is_gone_when_it_is_closed_and_a_view_outlives_it() -> None:
    segment = Segment.create("test", PAGE)
    view = segment.view(0, 3)
    segment.close()
    view.raw = b"yes"
    assert view.raw == b"yes" and memory_files()
    del view
    assert not memory_files()


def test_what_is_not_sealed_is_refused() -> None:
    fd = os.memfd_create("fivefold-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(ArenaError, match="could shrink it"):
        Segment.attach(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ArenaError, match="could shrink it"):
        Segment.attach(fd)
    os.close(fd)
    with socket.socket() as other, pytest.raises(ArenaError, match="no memory file"):
        Segment.attach(other.fileno())


def test_more_than_there_is_is_refused_before_it_is_touched() -> None:
    with pytest.raises(
        ArenaError, match=r"too-much needs 1,073,741,824 MiB .* are left .*: ask for"
    ):
        Segment.create("too-much", 1 << 50)


def cgroup(root: Path, version: int, limit: str, used: int, cached: int) -> Path:
    folder = root / ("memory/job" if version == 1 else "job")
    folder.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limits, usage, key = (
        names if version == 1 else ("memory.max", "memory.current", "inactive_file")
    )
    (folder / limits).write_text(f"{limit}\n")
    (folder / usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{key} {cached}\n")
    groups = root / "groups"
    groups.write_text("4:cpu,memory:/job\n" if version == 1 else "0::/job\n")
    return groups


@pytest.mark.parametrize("version", [1, 2])
def test_the_control_group_bounds_what_there_is(tmp_path: Path, version: int) -> None:
    groups = cgroup(tmp_path, version, "1000000", 700_000, 100_000)
    assert limit_bytes(tmp_path, groups) == 1_000_000
    assert available_bytes(tmp_path, groups) == 400_000


def test_without_a_limit_the_machine_bounds_it(tmp_path: Path) -> None:
    groups = cgroup(tmp_path, 2, "max", 5, 0)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable: 12 kB\n")
    assert limit_bytes(tmp_path, groups) == 1 << 60
    assert available_bytes(tmp_path, groups, meminfo) == 12 * 1024


def test_a_heap_gives_out_again_what_came_back(segment: Segment) -> None:
    heap = Heap(segment)
    first, second, third = (heap.allocate(PAGE + 1) for _ in range(3))
    at = heap.offset_of(ctypes.addressof(second))
    assert at == 2 * PAGE and len(second) == PAGE + 1
    del first, second
    joined = heap.allocate(4 * PAGE)
    assert heap.offset_of(ctypes.addressof(joined)) == 0
    assert heap.touched_bytes == 6 * PAGE
    with pytest.raises(ArenaError, match="no room"):
        heap.allocate(11 * PAGE)
    del third
    assert len(heap.allocate(10 * PAGE)) == 10 * PAGE


def test_segments_pass_through_a_gate_and_the_caller_is_known(segment: Segment) -> None:
    with Gate() as gate:
        caller = threading.Thread(target=lambda: _call(gate.address, segment))
        caller.start()
        with gate.accept(5) as line:
            message, fds = line.receive()
            assert (message, line.pid, len(fds)) == (b"take this", os.getpid(), 1)
            with Segment.attach(fds[0]) as other:
                assert other.view(0, 1).raw == b"x"
            with pytest.raises(ArenaError, match="hung up"):
                line.receive()
        caller.join()


def _call(address: str, segment: Segment) -> None:
    segment.view(0, 1).raw = b"x"
    with connect(address, 5) as line:
        line.send(b"take this", [segment.fd])


def test_nobody_calls_and_nobody_is_there() -> None:
    with Gate() as gate, pytest.raises(ArenaError, match="nobody called"):
        gate.accept(0.01)
    with pytest.raises(ArenaError, match="is gone"):
        connect(gate.address, 1)


def test_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate() as gate:
        true_user = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: true_user + 1)
        with pytest.raises(ArenaError, match=f"belongs to user {true_user}"):
            connect(gate.address, 1)
        with pytest.raises(ArenaError, match="nobody called"):
            gate.accept(0.05)


def test_processes_of_one_container_are_of_one_node() -> None:
    code = "from fivefold.arena import node_name; print(node_name())"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert told.stdout.strip() == node_name()


def test_the_core_is_there_or_says_why_not() -> None:
    why = problem()
    assert not why or "C compiler" in why


TWO_AT_ONCE = """
import multiprocessing, os
from fivefold.arena import ArenaError, Segment, budget

MOST = 192 << 20
context = multiprocessing.get_context("fork")
barrier, answers = context.Barrier(2), context.SimpleQueue()
segments = [Segment.create("test", 256 << 20, sparse=True) for _ in range(2)]

def left():  # as if the machine had so much: what both have really taken counts
    return MOST - sum(os.fstat(segment.fd).st_blocks * 512 for segment in segments)

def take(segment):
    budget.available_bytes = left
    barrier.wait()
    try:
        segment.touch(0, 128 << 20, "a tensor")
        answers.put("taken")
    except ArenaError as problem:
        answers.put(str(problem))

children = [context.Process(target=take, args=(segment,)) for segment in segments]
for child in children:
    child.start()
print(*sorted(answers.get() for _ in children), sep="|")
for child in children:
    child.join()
assert left() > 0, left()
"""


def test_of_two_that_ask_at_once_for_the_last_memory_one_gets_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_AT_ONCE], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    refused, taken = done.stdout.strip().split("|")
    assert taken == "taken"
    assert refused.startswith("a tensor needs 128 MiB of shared memory, but 64 MiB are left")


def test_who_does_not_give_its_turn_back_is_waited_for_in_vain(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fivefold.arena.budget._TURN_S", 0.1)
    with (
        in_turn(),
        pytest.raises(ArenaError, match=r"another process has been taking .*arena\.lock"),
    ):
        segment.touch(0, PAGE, "a tensor")
    segment.touch(0, PAGE, "a tensor")


def test_a_lock_that_somebody_else_has_made_is_told_and_not_used(
    segment: Segment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"fivefold-{os.getuid()}-arena.lock").symlink_to("elsewhere")
    segment.touch(0, PAGE, "a tensor")
    assert "take shared memory without waiting for each other" in caplog.text
    assert not (tmp_path / "elsewhere").exists()
