"""The backend "fivefold" on several nodes: ranks that share no memory, and reach each other through streams.

The nodes are told: real processes, which meet as those of other nodes do, over the loopback interface.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence

import pytest

import comm_checks
import comm_consumers
import comm_messages
from fivefold.arena.native import problem
from fivefold.launch.port import reserved_port
from pool import Failed, Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")
NODES = [(0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1, 2)]
"""by rank: one rank each, uneven ones, dealt out in turn, in order, and three"""


def name_of(nodes: Sequence[int]) -> str:
    return "".join(map(str, nodes))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(5) as pool:
        yield pool


@pytest.mark.parametrize("nodes", NODES, ids=name_of)
@pytest.mark.parametrize(("dtype", "later"), [("float32", False), ("bfloat16", True)])
def test_every_operation_does_what_gloo_does(
    pool: Pool, dtype: str, later: bool, nodes: Sequence[int]
) -> None:
    for count in (0, 5, 30_001):
        asked = comm_checks.every_operation, dtype, count, later
        ours = pool.run("fivefold", *asked, size=len(nodes), nodes=nodes)
        theirs = pool.run("gloo", *asked, size=len(nodes))
        for rank, results in enumerate(ours):
            for name, result in results.items():
                assert isinstance(result, list), f"{name} on rank {rank}: {result}"
                expected = theirs[rank][name]
                if isinstance(expected, list) and not (dtype == "bfloat16" and "reduce" in name):
                    assert result == expected, f"{name} on rank {rank} of {len(nodes)}"


@pytest.mark.parametrize("nodes", NODES, ids=name_of)
def test_random_sums_are_those_of_one_process_bit_by_bit(pool: Pool, nodes: Sequence[int]) -> None:
    checked = pool.run(
        "fivefold", comm_checks.random_operations, len(nodes), 25, 1 << 20, nodes, size=len(nodes),
        nodes=nodes,
    )  # fmt: skip
    assert len(set(checked)) == 1 and checked[0] >= 25


@pytest.mark.parametrize("nodes", NODES, ids=name_of)
def test_each_node_may_round_its_part(pool: Pool, nodes: Sequence[int]) -> None:
    size = len(nodes)
    pool.run(
        "fivefold", comm_checks.random_operations, 7, 40, 1 << 20, nodes, True, size=size, nodes=nodes,
        comm={"partials": "own"},
    )  # fmt: skip
    exact = pool.run("fivefold", comm_checks.sums_of_halves, 5000, size=size, nodes=nodes)
    rounded = pool.run(
        "fivefold",
        comm_checks.sums_of_halves,
        5000,
        size=size,
        nodes=nodes,
        comm={"partials": "own"},
    )
    alone = len({*nodes}) == size
    assert (rounded == exact) == alone, "with a rank per node there is nothing to round"


@pytest.mark.parametrize("comm", [{}, {"partials": "own"}], ids=["exact", "own"])
@pytest.mark.parametrize("direct_bytes", [0, 1000, 1 << 20])
@pytest.mark.parametrize(
    "nodes",
    [(0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 1, 2, 3), (0, 1, 0, 2, 3), (0, 0, 1, 1, 2)],
    ids=name_of,
)
def test_small_sums_by_doubling_are_the_same(
    pool: Pool, nodes: Sequence[int], direct_bytes: int, comm: dict[str, str]
) -> None:
    size, told = len(nodes), {**comm, "direct_bytes": direct_bytes}
    checked = pool.run(
        "fivefold", comm_checks.random_operations, direct_bytes + size, 40, 1 << 14, nodes, bool(comm),
        size=size, nodes=nodes, comm=told,
    )  # fmt: skip
    assert len(set(checked)) == 1 and checked[0] >= 40


@pytest.mark.parametrize(
    "nodes",
    [(0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 1, 2, 3), (0, 1, 0, 2, 3), (0, 0, 1, 1, 2)],
    ids=name_of,
)
def test_small_gathers_by_doubling_are_the_same(pool: Pool, nodes: Sequence[int]) -> None:
    for dtype, count in (("float32", 0), ("uint8", 1), ("float64", 300), ("float32", 3000)):
        asked = comm_checks.every_operation, dtype, count, count > 1
        ours = pool.run("fivefold", *asked, size=len(nodes), nodes=nodes, comm={"direct_bytes": 0})
        assert ours == pool.run("fivefold", *asked, size=len(nodes), nodes=nodes)


@pytest.mark.parametrize("rails", [2, 3, 8])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 1, 1, 1, 2)], ids=name_of)
def test_large_tensors_by_several_streams_are_the_same(
    pool: Pool, nodes: Sequence[int], rails: int
) -> None:
    size = len(nodes)
    for dtype, count in (("float32", 300_001), ("bfloat16", 65_536), ("float64", 16_385)):
        asked = comm_checks.every_operation, dtype, count, True
        ours = pool.run("fivefold", *asked, size=size, nodes=nodes, comm={"streams": rails})
        assert ours == pool.run("fivefold", *asked, size=size, nodes=nodes)
    pool.run(
        "fivefold", comm_checks.random_operations, rails, 12, 1 << 21, nodes, size=size, nodes=nodes,
        comm={"streams": rails},
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 1)], ids=name_of)
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_tensors_that_the_core_does_not_reach_are_copied(
    pool: Pool, later: bool, nodes: Sequence[int]
) -> None:
    """As those of GPUs that ranks share are."""
    for count in (5, 30_001):
        asked = "float32", count, later
        ours = pool.run(
            "fivefold", comm_checks.through_copies, *asked, size=len(nodes), nodes=nodes
        )
        assert ours == pool.run(
            "fivefold", comm_checks.every_operation, *asked, size=len(nodes), nodes=nodes
        )


def test_sums_do_not_depend_on_where_ranks_are(pool: Pool) -> None:
    """Where each node has a branch of the tree over all ranks."""
    for nodes in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)):
        pool.run("fivefold", comm_checks.random_operations, 3, 10, 1 << 18, size=4, nodes=nodes)


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 0, 1), (0, 1, 0)], ids=name_of)
@pytest.mark.parametrize("count", [1, 100, 200_000])
def test_messages_arrive_as_over_gloo(pool: Pool, count: int, nodes: Sequence[int]) -> None:
    ours = pool.run("fivefold", comm_messages.every_message, count, size=3, nodes=nodes)
    assert ours == pool.run("gloo", comm_messages.every_message, count, size=3)


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1), (0, 0, 1), (0, 1, 1, 1, 2)], ids=name_of)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hundreds_of_messages_are_under_way_at_once(
    pool: Pool, seed: int, nodes: Sequence[int]
) -> None:
    taken = pool.run("fivefold", comm_messages.many_messages, seed, size=len(nodes), nodes=nodes)
    assert sum(taken) == 400


def test_objects_travel_as_over_gloo(pool: Pool) -> None:
    ours = pool.run("fivefold", comm_checks.every_object, size=3, nodes=(0, 1, 1))
    assert ours == pool.run("gloo", comm_checks.every_object, size=3)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.mark.long(every=4)
@pytest.mark.parametrize("consumer", comm_consumers.ALL)
def test_what_torch_builds_on_groups_works_as_over_gloo(pair: Pool, consumer: str) -> None:
    ours = pair.run("fivefold", comm_consumers.result_of, consumer, nodes=(0, 1))
    assert ours == pair.run("gloo", comm_consumers.result_of, consumer)


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 1, 1), (0, 0, 1)], ids=name_of)
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_a_rank_that_is_killed_is_told_to_all(later: bool, nodes: Sequence[int]) -> None:
    with Pool(3) as pool:
        pool.start("fivefold", comm_checks.killed, later, nodes=nodes)
        for waited_s, text in pool.collect([0, 2]):
            assert waited_s < 2.0
            assert "rank 1 has ended" in text


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3, 4), (0, 1, 1, 2, 3)], ids=name_of)
@pytest.mark.parametrize("dies", [False, True], ids=["late", "dies"])
def test_who_is_missing_is_named_where_sums_are_made_by_doubling(
    dies: bool, nodes: Sequence[int]
) -> None:
    asked = (comm_checks.killed, False, 100) if dies else (comm_checks.lateness, 5.0)
    with Pool(5) as pool:
        pool.start(
            "fivefold", *asked, timeout_s=60 if dies else 0.5, nodes=nodes, comm={"direct_bytes": 0}
        )
        for waited_s, text in pool.collect([0, 2, 3, 4]):
            assert waited_s < (2.0 if dies else 4.5)
            assert ("rank 1 has ended" if dies else "Timed out waiting for rank 1") in text


def test_a_rank_that_is_killed_is_told_on_several_streams() -> None:
    with Pool(3) as pool:
        pool.start("fivefold", comm_checks.killed, True, nodes=(0, 1, 2), comm={"streams": 4})
        for waited_s, text in pool.collect([0, 2]):
            assert waited_s < 2.0
            assert "rank 1 has ended" in text


@pytest.mark.parametrize("size", [40_000, 1_000_000, 50_002, 1_000_002])
@pytest.mark.parametrize("rails", [1, 2, 8])
def test_a_rank_that_is_killed_before_it_sends_is_told(rails: int, size: int) -> None:
    with Pool(2) as pool:
        pool.start(
            "fivefold", comm_checks.killed_before, size, nodes=(0, 1), comm={"streams": rails}
        )
        ((waited_s, text),) = pool.collect([0])
    assert waited_s < 2.0
    assert "rank 1 has ended" in text


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0)], ids=name_of)
def test_a_rank_that_is_killed_while_it_sends_is_told(nodes: Sequence[int]) -> None:
    with Pool(2) as pool:
        pool.start("fivefold", comm_checks.killed_in_a_message, nodes=nodes)
        ((waited_s, text),) = pool.collect([0])
        assert waited_s < 4.0  # with the time that 400 MB take
        assert "rank 1 has ended" in text


def test_what_a_killed_rank_has_forked_does_not_hide_its_end() -> None:
    with Pool(2) as pool:
        pool.start("fivefold", comm_checks.killed_with_a_child, nodes=(0, 1))
        ((waited_s, text),) = pool.collect([0])
        assert waited_s < 2.0
        assert "rank 1 has ended" in text


def test_a_forked_child_is_no_rank() -> None:
    with Pool(2) as pool:
        texts = pool.run("fivefold", comm_checks.in_a_child, nodes=(0, 1))
    assert len(texts[0]) == 3
    assert all(", rank 0, of which this one is a forked copy" in text for text in texts[0])


@pytest.mark.slow
def test_a_hundred_kills_on_four_nodes_are_told_to_all() -> None:
    for number in range(100):
        with Pool(4) as pool:
            pool.start("fivefold", comm_checks.killed, bool(number % 2), nodes=(0, 1, 2, 3))
            for waited_s, text in pool.collect([0, 2, 3]):
                assert waited_s < 2.0
                assert "rank 1 has ended" in text


def test_streams_are_taken_at_the_ports_of_the_plan() -> None:
    with reserved_port(None) as free, Pool(2) as pool:
        ports = pool.run("fivefold", comm_checks.at_ports, free, free + 40, nodes=(0, 1))
    assert ports[0] != ports[1]
    assert all(free <= port <= free + 40 for port in ports)  # what is held may be bound, as it says


def test_ports_that_are_taken_are_told() -> None:
    with socket.create_server(("", 0)) as taken, Pool(2) as pool:
        port = int(taken.getsockname()[1])
        pool.start("fivefold", comm_checks.at_ports, port, port, nodes=(0, 1))
        for told in pool.collect(range(2)):
            assert isinstance(told, Failed)
            assert f"none of the ports {port} to {port} (comm.ports) is free" in told.text


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 1, 1), (0, 0, 1)], ids=name_of)
def test_a_rank_that_does_not_come_is_named(nodes: Sequence[int]) -> None:
    with Pool(3) as pool:
        pool.start("fivefold", comm_checks.lateness, 4.0, timeout_s=0.5, nodes=nodes)
        found = pool.collect(range(3))
    for waited_s, text in (found[0], found[2]):
        assert 0.3 < waited_s < 3.5  # a node has a second to say so to the others
        assert "Timed out waiting for rank 1" in text  # to which the others have sent what it needs
        assert nodes != (0, 1, 2) or re.search(r" of [\d,]+ bytes have come from rank 1\)", text), (
            text
        )


def test_how_far_a_transfer_came_is_told() -> None:
    with Pool(2) as pool:
        pool.start("fivefold", comm_checks.stopped, timeout_s=0.5, nodes=(0, 1))
        told, _ = pool.collect(range(2))
    assert re.search(
        r"waiting for rank 1 \([\d,]+ of 16,777,216 bytes have come from rank 1\)", told
    ), told


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 0, 1)], ids=name_of)
def test_another_operation_is_told_and_ends_the_group(nodes: Sequence[int]) -> None:
    with Pool(3) as pool:
        texts = pool.run("fivefold", comm_checks.mismatch_on_nodes, nodes=nodes)
    assert any("this rank asks for all_reduce sum of 3 float" in text for text in texts)
    told = (
        "this rank asks for all_reduce",
        "asked for something else than another rank",
        "has left the group",  # since it was told
    )
    assert all(any(words in text for words in told) for text in texts), texts


def test_messages_of_other_sizes_and_dtypes_are_told() -> None:
    with Pool(2) as pool:
        texts = pool.run("fivefold", comm_checks.wrong_length, nodes=(0, 1))
        assert "rank 0 sent 40 bytes, more than the tensor holds" in texts[1]
