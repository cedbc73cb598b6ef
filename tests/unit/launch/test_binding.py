"""Cores for ranks: of their own, near their GPUs, within what was granted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.launch.binding import bound, shares

TWO = {0: [(n, n + 8) for n in range(4)], 1: [(n, n + 8) for n in range(4, 8)]}


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([None, None], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ([1, 0], [(4, 5, 6, 7, 12, 13, 14, 15), (0, 1, 2, 3, 8, 9, 10, 11)]),
        ([1, 1], [(4, 5, 12, 13), (6, 7, 14, 15)]),
        ([0, None], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ([7, 7], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ([None] * 3, [(0, 1, 8, 9), (2, 3, 4, 10, 11, 12), (5, 6, 7, 13, 14, 15)]),
        ([1] * 5, [(0, 8), (1, 2, 9, 10), (3, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        ([None] * 9, [()] * 9),
    ],
    ids=[
        "halves",
        "near",
        "one node",
        "no wish",
        "no such node",
        "uneven",
        "too many there",
        "too many",
    ],
)
def test_shares(wanted: list[int | None], told: list[tuple[int, ...]]) -> None:
    assert shares(TWO, wanted) == told


@given(
    st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1),
    st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=12),
)
def test_no_core_belongs_to_two_ranks(sizes: dict[int, int], wanted: list[int | None]) -> None:
    groups: dict[int, list[tuple[int, ...]]] = {}
    first = 0
    for node, size in sizes.items():
        groups[node] = [(core,) for core in range(first, first + size)]
        first += size
    told = shares(groups, wanted)
    assert len(told) == len(wanted)
    every = [core for cores in told for core in cores]
    assert len(set(every)) == len(every) and set(every) <= set(range(first))
    assert all(told) or not any(told)
    assert any(told) == (first >= len(wanted))


def machine(root: Path, cores: int, quota: str = "", nodes: int = 2) -> Path:
    """NUMA nodes of equally many cores with two threads each, as the kernel shows them."""
    for cpu in range(2 * cores):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        topology.joinpath("thread_siblings_list").write_text(
            f"{cpu % cores},{cpu % cores + cores}\n"
        )
    for node in range(nodes):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        own = [n for n in range(2 * cores) if n % cores * nodes // cores == node]
        (folder / "cpulist").write_text(",".join(map(str, own)) + "\n")
    (root / "sys/devices/system/cpu/online").write_text(f"0-{2 * cores - 1}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    if quota:
        (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    return root


def test_a_narrower_mask_is_respected_and_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    root = machine(tmp_path, 4)
    assert bound(range(8), 2, root) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert bound([1, 2, 3, 5], 2, root) == [(1, 5), (2, 3)]
    assert bound([1, 2], 3, root) == [(), (), ()]


def test_ranks_that_share_a_device_have_cores_of_their_own(tmp_path: Path) -> None:
    root = machine(tmp_path, 4, nodes=1)
    assert bound(range(8), 2, root, per_device=2) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert bound(range(8), 5, root, per_device=5) == [()] * 5


def test_under_a_quota_or_where_all_memory_is_as_near_nobody_is_bound(tmp_path: Path) -> None:
    assert bound(range(8), 2, machine(tmp_path / "a", 4, "150000 100000")) == [(), ()]
    assert bound(range(8), 2, machine(tmp_path / "b", 4, nodes=1)) == [(), ()]
