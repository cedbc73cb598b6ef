"""What takes the place of nodes that are lost, and what ranks tell of their progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fivefold.errors import LaunchError
from fivefold.launch.job import Job, NodeRanks
from fivefold.launch.job_nodes import JobNodes
from fivefold.launch.progress import OwnProgress, ProgressFile, RankProgress
from fivefold.launch.restarts import FinalFailure
from fivefold.launch.shrinking import Shrinking, fitted
from fivefold.plan import Layout, Memory, Numerics, Plan, Provenance


def nodes(*ranks: int) -> JobNodes:
    places = tuple(NodeRanks(f"node{number}", count) for number, count in enumerate(ranks))
    return JobNodes(Job(["true"], sum(ranks), Path("logs"), nodes=places))


def lose(found: JobNodes, *numbers: int) -> None:
    for number in numbers:
        found[number].lost = "gone"


def shrinking(least: int, **layout: int) -> Shrinking:
    return Shrinking(least, Plan(layout=Layout(**layout)))


def ranks(found: JobNodes) -> list[tuple[int, list[int]]]:
    return [(node.number, [*node.ranks]) for node in found.working()]


def test_spares_come_first_and_then_others_do_without() -> None:
    found, said = nodes(2, 2, 2, 0), list[str]()
    lose(found, 0, 1)
    found.replace_lost(said.append, Shrinking(1))
    assert ranks(found) == [(2, [0, 1]), (3, [2, 3])]
    assert said[0] == "note: node node3 takes the place of node0"
    assert said[1].endswith("the run goes on with 4 ranks on 2 nodes")


def test_a_node_that_was_lost_while_it_had_no_ranks_gets_none() -> None:
    found = nodes(1, 1, 1, 1)
    pairs = shrinking(1, data=2, height=2)
    lose(found, 3)
    found.replace_lost(print, pairs)
    assert ranks(found) == [(0, [0]), (1, [1])]
    lose(found, 2, 1)
    with pytest.raises(FinalFailure, match="left: 1 rank on 1 node; a replica needs 2"):
        found.replace_lost(print, pairs)


def test_a_plan_for_fewer_ranks_is_used_where_it_uses_more_of_them(tmp_path: Path) -> None:
    memory = Memory(recompute=8, shard="optimizer")
    Plan(layout=Layout(height=3), memory=memory).save(tmp_path / "3.toml")
    (tmp_path / "1.toml").write_text("[numerics]\nseed = 5\n")
    whole = Plan(layout=Layout(data=2, height=2), numerics=Numerics(seed=7))
    smaller = fitted(whole, [tmp_path / "3.toml", tmp_path / "1.toml"])
    found, less = nodes(1, 1, 1, 1), Shrinking(1, whole, smaller)
    for lost, layout, recompute in (
        (1, Layout(height=3), 8),
        (2, Layout(height=2), "none"),
        (3, Layout(), "none"),
    ):
        lose(found, lost)
        found.replace_lost(print, less)
        (tmp_path / f"{lost}").mkdir()
        told = less.environment(layout.size, tmp_path / f"{lost}")
        plan = Plan.load(told["FIVEFOLD_PLAN"])
        assert sum(len(node.ranks) for node in found.working()) == plan.layout.size
        assert (plan.layout, plan.memory.recompute, plan.numerics.seed) == (layout, recompute, 7)
        assert plan.memory == (memory if layout.height == 3 else Memory())
    lose(found, 0)
    with pytest.raises(
        FinalFailure, match="a replica needs 2, and no --smaller-plan is for so few"
    ):
        found.replace_lost(print, less)


def test_nodes_without_ranks_do_not_count() -> None:
    found = nodes(2, 1, 1)
    lose(found, 1)
    with pytest.raises(
        FinalFailure,
        match="left: 3 ranks on 2 nodes; 1 node would work, fewer than --min-nodes",
    ):
        found.replace_lost(print, shrinking(2, data=2, height=2))


def test_without_shrinking_it_is_the_end() -> None:
    found = nodes(1, 1)
    lose(found, 1)
    with pytest.raises(LaunchError, match="no spare is left for node node1: gone"):
        found.replace_lost(print, None)


def test_ranks_tell_how_far_they_are() -> None:
    with ProgressFile(2) as file:
        own = OwnProgress(file.path, 1)
        own.stepped()
        own.went_on_from(4, "0a0b")
        own.given(5)
        assert file.read() == [RankProgress(), RankProgress(3, 1, 4, 4, 0x0A0B, 5)]
        own.noticed(0.5)
        own.saved(2.0)
        own.saved(1.0)
        own.copied(3.0)
        assert file.read()[1][-2:] == (2500, 3000)
        with own.unwatched():
            assert file.read()[1].signs == -1
        assert file.read()[1].signs == 0
        OwnProgress(file.path, 7).stepped()  # of a job within the job
        assert file.read()[0] == RankProgress()


def test_what_is_no_place_for_progress_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "data"
    other.write_bytes(b"0" * 4096)
    with other.open("r+b") as file:
        OwnProgress(f"/proc/{os.getpid()}/fd/{file.fileno()}", 0).stepped()
    OwnProgress(str(tmp_path / "gone"), 0).stepped()
    assert other.read_bytes() == b"0" * 4096


def test_a_layout_that_leaves_replicas_open_shrinks_to_a_plan_for_fewer(tmp_path: Path) -> None:
    def by_hand(**layout: int) -> Plan:
        values = {f"layout.{axis}": size for axis, size in layout.items()}
        return Plan().replace(values, Provenance("user", "by hand"))

    by_hand(height=2).save(tmp_path / "2.toml")
    whole = by_hand(height=3)
    less = Shrinking(1, whole, fitted(whole, [tmp_path / "2.toml"]))
    assert less.world(2) == 2
    told = less.environment(2, tmp_path)
    assert Plan.load(told["FIVEFOLD_PLAN"]).layout.height == 2
