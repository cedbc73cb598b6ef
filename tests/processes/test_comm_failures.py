"""What the ranks of a group are told when another does something else, comes late, or dies."""

from __future__ import annotations

from pathlib import Path

import pytest

import comm_checks
import comm_messages
from fivefold.arena.native import problem
from pool import Failed, Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_works_on() -> None:
    with Pool(3) as pool:
        texts = pool.run("fivefold", comm_checks.mismatch)
    assert "rank 1 for all_reduce sum of 3 float64" in texts[0]
    assert "asks for all_reduce sum of 3 float64, rank" in texts[1]
    assert all("all_reduce (number 0 of group" in text for text in texts)


def test_a_rank_that_does_not_come_is_named() -> None:
    with Pool(3) as pool:
        pool.start("fivefold", comm_checks.lateness, timeout_s=0.5)
        found = pool.collect(range(3))
    for waited_s, text in (found[0], found[2]):
        assert 0.3 < waited_s < 1.4
        assert "Timed out waiting for rank 1" in text
    assert "has given up: Timed out waiting for rank 1" in found[1][1]


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_a_rank_that_is_killed_is_noticed_by_all_and_leaves_nothing_behind(later: bool) -> None:
    shared = set(Path("/dev/shm").iterdir())
    with Pool(3) as pool:
        pool.start("fivefold", comm_checks.killed, later)
        found = pool.collect([0, 2])
        for waited_s, text in found:
            assert waited_s < 2.0
            assert "rank 1 has ended" in text
        left = [fd for q in (0, 2) for fd in _memory_files(pool.processes[q].pid) if "group" in fd]
    assert not left
    assert set(Path("/dev/shm").iterdir()) <= shared


def _memory_files(pid: int) -> list[str]:
    """Memory files of ours that a process holds open or mapped."""
    folder = Path(f"/proc/{pid}")
    names = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
    names += [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
    return [name for name in names if "fivefold-" in name]


def test_a_message_that_does_not_fit_is_told() -> None:
    with Pool(2) as pool:
        texts = pool.run("fivefold", comm_checks.wrong_length)
    assert "rank 0 sent 40 bytes, more than the tensor holds" in texts[1]


@pytest.mark.parametrize("count", [5, 3 << 20])
def test_a_message_of_another_dtype_is_told_and_not_delivered(count: int) -> None:
    with Pool(2) as pool:
        sender, told = pool.run("fivefold", comm_messages.other_dtype, count)
    assert sender == [] and len(told) == 3
    assert "rank 1 of 2: message with rank 0, tag 1 (number 1 of group" in told[1]
    assert f"rank 0 sent {4 * count} bytes of torch.float32, and the tensor that" in told[0]
    assert "receives them is of torch.int32: give both the same dtype" in told[0]
    assert "torch.float64" in told[1] and "torch.int64" in told[1]
    assert "torch.uint8" in told[2] and "torch.bool" in told[2]


def test_a_forked_child_is_no_rank() -> None:
    with Pool(2) as pool:
        texts = pool.run("fivefold", comm_checks.in_a_child)
    assert len(texts[0]) == 3 and texts[1] == []
    for text in texts[0]:
        assert ", rank 0, of which this one is a forked copy" in text


def test_a_destroyed_group_refuses_everything() -> None:
    with Pool(2) as pool:
        texts = pool.run("fivefold", comm_checks.after_the_end)
    assert all("was destroyed; make a new one" in text for text in texts)


def test_a_group_of_one_needs_nobody_else() -> None:
    with Pool(2) as pool:
        pool.start("fivefold", comm_checks.dropped_works, size=1, timeout_s=1)
        assert not isinstance(pool.collect([0])[0], Failed)
