"""Nodes are lost at every moment of a save and of a recovery; the run ends as if they had not been.

Four nodes, a rank and an agent on each (tests/nodes.py). The oracle is the same run without faults; all
bits of what training depends on are compared.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from fault_checks import (
    BEFORE,
    CRASH_POINTS,
    Told,
    apart,
    broken,
    cluster,
    crash_of,
    ended,
    remove_flushed,
    run,
    same,
    says,
    two_die,
)  # fmt: skip
from nodes import Nodes
from template import Template

RARE = ("staged", "writing", "before-rename")
"""moments whose like are among the others: `make soak` tests all"""


def slow(*values: object) -> ParameterSet:
    """A case that only `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Node 0 is lost below: a job on another host has to wait until its hold on the directory has expired.
@pytest.mark.long
@apart
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param(p, 1 + n % 3, marks=[pytest.mark.slow] * (p in RARE))
        for n, p in enumerate(BEFORE)
    ],
)
def test_a_node_may_die_at_any_moment_of_a_save(
    point: str, victim: int, nodes: Nodes, oracle: list[Told]
) -> None:
    broken(run(nodes, "--flush-every=1", crash=crash_of(point), victim=victim), victim, nodes)
    found = ended(run(nodes, "--flush-every=1"))
    assert {one.start for one in found} <= {3, 6}
    same(found, oracle)


@pytest.mark.long
@apart
def test_a_run_whose_first_save_fails_begins_again(nodes: Nodes, oracle: list[Told]) -> None:
    broken(run(nodes, crash="writing:1@pid1", victim=2), 2, nodes)
    found = ended(run(nodes))
    assert {one.start for one in found} == {0}
    assert "it begins again" in found[0].text
    same(found, oracle)


@pytest.mark.long
@apart
@pytest.mark.parametrize("point", CRASH_POINTS[7:])
def test_a_node_may_die_at_any_moment_of_a_recovery(
    point: str, nodes: Nodes, oracle: list[Told]
) -> None:
    broken(run(nodes, crash="staged:3@pid1", victim=1), 1, nodes)
    broken(run(nodes, crash=crash_of(point), victim=1), 1, nodes)
    found = ended(run(nodes))
    assert {one.start for one in found} == {6}
    same(found, oracle)


PAIRS = ((1, 2), (2, 3), (1, 3))


@pytest.mark.long(every=8)
@apart
@pytest.mark.parametrize(
    ("point", "pair"), [(point, PAIRS[n % 3]) for n, point in enumerate(CRASH_POINTS)]
)
def test_two_nodes_may_die_at_any_moment(
    point: str, pair: tuple[int, int], nodes: Nodes, oracle: list[Told]
) -> None:
    two_die(point, pair, nodes, oracle)


@pytest.mark.long
@apart
def test_another_node_may_die_while_one_is_rebuilt(nodes: Nodes, oracle: list[Told]) -> None:
    broken(run(nodes, "--scheme=rs", crash="staged:3@pid1", victim=1), 1, nodes)
    broken(run(nodes, "--scheme=rs", crash=crash_of("restarting"), victim=2), 2, nodes)
    found = ended(run(nodes, "--scheme=rs"))
    assert {one.start for one in found} == {6}
    same(found, oracle)


@pytest.mark.long
@pytest.mark.parametrize("victim", [2, 0], ids=["any", "with-the-first-rank"])
def test_a_node_is_killed_from_outside(
    victim: int, nodes: Nodes, oracle: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_LEASE_S", "3")
    job = run(nodes, "--pause=0.2")
    says(job, "saving 6")
    nodes.kill(victim)
    job.fail(60.0)
    nodes.replace(victim)
    found = ended(run(nodes))
    assert {one.start for one in found} <= {3, 6, 9}
    same(found, oracle)


@pytest.mark.long
def test_a_run_whose_saves_are_all_lost_stops_until_it_is_told_to_begin_again(
    nodes: Nodes, oracle: list[Told]
) -> None:
    ended(run(nodes, "--lockstep", steps=6))
    remove_flushed(nodes)
    for node in (1, 2):
        nodes.replace(node)
    job = run(nodes)
    job.fail(90.0)
    told = job.told()
    assert "has made saves (the last: step 6 of start 1, on node0, node1, node2, node3" in told
    assert "begin_again=True" in told and "node1, node2" in told
    found = ended(run(nodes, "--begin-again"))
    assert {one.start for one in found} == {0}
    assert "it begins again at step 0" in found[0].text
    same(found, oracle)


@pytest.mark.long
@apart
def test_a_node_that_comes_back_with_a_dead_end_neither_wins_nor_deletes(
    nodes: Nodes, oracle: list[Told]
) -> None:
    """It was away while the others went back to what was flushed, and went on from there."""
    ended(run(nodes, "--lockstep", "--flush-every=1", steps=3))
    ended(run(nodes, "--lockstep", steps=10))
    kept = copied(nodes.disk(1))
    assert [name for name in kept if "step-00000009-epoch-2/manifest.json" in name]
    for path in (nodes.shared / "run").glob("step-*-epoch-2"):
        shutil.rmtree(path)
    for node in (1, 2):
        nodes.replace(node)
    ended(run(nodes, "--lockstep", steps=7))  # from 3 to 6: the third start
    before = {node: set(copied(nodes.disk(node))) for node in (0, 2, 3)}
    nodes.replace(1)
    put_back(nodes.disk(1), kept)
    remove_flushed(nodes)
    found = ended(run(nodes, "--lockstep", steps=7))
    assert {one.start for one in found} == {6}, "not 9, which is newer by its step"
    for node, names in before.items():
        assert names <= set(copied(nodes.disk(node))), "nothing is removed elsewhere"
    same(ended(run(nodes)), oracle)


@pytest.mark.long
@apart
def test_a_node_that_comes_back_with_an_old_save_is_brought_up_to_date(
    nodes: Nodes, oracle: list[Told]
) -> None:
    ended(run(nodes, "--lockstep", steps=4))
    kept = copied(nodes.disk(2))
    ended(run(nodes, "--lockstep", steps=10))
    nodes.replace(2)
    put_back(nodes.disk(2), kept)
    remove_flushed(nodes)
    found = ended(run(nodes))
    assert {one.start for one in found} == {9}
    same(found, oracle)


def copied(disk: Path) -> dict[str, bytes]:
    """All files of a disk by their name."""
    return {str(p.relative_to(disk)): p.read_bytes() for p in disk.rglob("*") if p.is_file()}


def put_back(disk: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_bytes(data)


@pytest.mark.long
def test_a_run_goes_on_from_where_it_was_stopped(nodes: Nodes, oracle: list[Told]) -> None:
    ended(run(nodes, steps=6))
    found = ended(run(nodes))
    assert {one.start for one in found} == {6}
    same(found, oracle)


@pytest.mark.long
def test_two_lost_nodes_leave_what_was_flushed(nodes: Nodes, oracle: list[Told]) -> None:
    ended(run(nodes, "--lockstep", steps=7))  # the last save, of step 6, is flushed at the end
    job = run(nodes, "--lockstep")
    says(job, "saved 9")
    for node in (1, 3):
        nodes.kill(node)
    job.fail(60.0)
    for node in (1, 3):
        nodes.replace(node)
    found = ended(run(nodes))
    assert {one.start for one in found} == {6}
    assert "step 9" in found[0].text
    same(found, oracle)


@pytest.mark.parametrize("lost", [(0, 2), slow((1, 2)), slow((3, 0))], ids=str)
def test_two_lost_nodes_are_rebuilt_by_rs(
    lost: Sequence[int], nodes: Nodes, oracle: list[Told]
) -> None:
    ended(run(nodes, "--scheme=rs", steps=6))
    remove_flushed(nodes)
    for node in lost:
        nodes.replace(node)
    found = ended(run(nodes, "--scheme=rs"))
    assert {one.start for one in found} == {6}
    same(found, oracle)


@pytest.mark.long
def test_three_lost_nodes_are_more_than_rs_bears(nodes: Nodes, oracle: list[Told]) -> None:
    ended(run(nodes, "--scheme=rs", "--lockstep", steps=6))
    remove_flushed(nodes)
    for node in (1, 2, 3):
        nodes.replace(node)
    job = run(nodes, "--scheme=rs")
    job.fail(90.0)
    assert "the data of 1 (node1), 2 (node2), 3 (node3) is lost or damaged" in job.told()
    assert "scheme rs cannot rebuild it" in job.told()
    found = ended(run(nodes, "--scheme=rs", "--begin-again"))
    same(found, oracle)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "after"),
    [
        ((), [0, 1, 2]),
        slow((2,), [0, 1, 3]),
        ((1,), [3, 2]),
        slow((), [0, 1, 2, 3, 4]),
        ((0,), [4, 1, 2, 3, 0]),
    ],
    ids=["three", "three-of-four-left", "two", "five", "five-in-another-order"],
)
def test_other_numbers_of_nodes_go_on(
    lost: Sequence[int], after: Sequence[int], template: Template
) -> None:
    with cluster(5, template) as nodes:
        [before, *_] = ended(run(nodes, on=[0, 1, 2, 3], steps=6))
        for node in lost:
            nodes.replace(node)
        found = ended(run(nodes, on=after, steps=7))
    assert {one.start for one in found} == {6}
    assert {one.loaded for one in found} == {before.steps[6].split()[-1]}


# --- damage ----------------------------------------------------------------------------------------


def flip(path: Path, draw: random.Random) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def latest(disk: Path) -> Path:
    """The newest generation on a node."""
    return max(disk.glob("*/step-*"))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["__*.distcp", *(slow(name) for name in (".metadata", "manifest.json")), "redundancy-*.bin"],
)
def test_a_flipped_bit_is_repaired(kind: str, nodes: Nodes, oracle: list[Told]) -> None:
    ended(run(nodes, steps=6))
    flip(next(latest(nodes.disk(1)).glob(kind)), random.Random(kind))
    remove_flushed(nodes)
    found = ended(run(nodes))
    assert {one.start for one in found} == {6}
    same(found, oracle)


@pytest.mark.long
@pytest.mark.parametrize("name", ["__1_0.distcp", slow("run.json"), slow("saved-epoch-1.json")])
def test_a_flipped_bit_in_the_shared_directory_is_said(
    name: str, nodes: Nodes, oracle: list[Told]
) -> None:
    """A copy that is damaged is no copy; what is written twice or not needed costs nothing."""
    ended(run(nodes, "--lockstep", "--flush-every=1", steps=6))
    [path] = [*(nodes.shared / "run").glob(name), *(nodes.shared / "run").glob(f"*6-*/{name}")]
    flip(path, random.Random(name))
    for node in range(1, 4):
        nodes.replace(node)
    found = ended(run(nodes))
    damaged = name.endswith(".distcp")
    assert {one.start for one in found} == {3 if damaged else 6}
    if damaged:
        assert "a newer save is passed over: step-00000006-epoch-1" in found[0].text
    if name == "run.json":
        assert "its copy is used instead" in found[0].text
    same(found, oracle)


@pytest.mark.long
def test_more_damage_than_parity_repairs_costs_a_save(nodes: Nodes, oracle: list[Told]) -> None:
    ended(run(nodes, steps=6))
    draw = random.Random(0)
    for node in (0, 2):
        flip(next(latest(nodes.disk(node)).glob("__*.distcp")), draw)
    remove_flushed(nodes)
    found = ended(run(nodes))
    assert {one.start for one in found} == {3}
    assert "step 6" in found[0].text, "what was passed over is told"
    same(found, oracle)
