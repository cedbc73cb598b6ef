"""From which save a run goes on, and what is rebuilt for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.inventory import PERSISTENT, Holding, Inventory
from fivefold.checkpoint.manifest import METADATA, redundancy_name
from fivefold.checkpoint.recovery_plan import (
    RebuildTask,
    RecoveryChoice,
    RecoveryPlan,
    candidates,
    choose,
    plan,
)
from fivefold.checkpoint.run import RunHistory, Start
from fivefold.checkpoint.schemes import scheme_named
from fivefold.errors import Unrecoverable
from generations import SavedState, saved_state

FOUR = [[40, 8], [30, 8], [41], [7, 7]]


def held(state: SavedState, member: int, *, without: str = "", protected: bool = True) -> Holding:
    """What the node of a member has when nothing but the files `without` is missing."""
    names = {item.name for item in state.manifest.members[member].items} | {METADATA}
    if protected:
        names.add(redundancy_name(member))
    return Holding(
        replace(state.manifest, me=member), frozenset(names - set(without.split())), member
    )


def persistent(state: SavedState, *, without: str = "") -> Holding:
    names = {item.name for item in state.manifest.items()} - set(without.split())
    return Holding(state.manifest, frozenset(names))


def world(*nodes: list[Holding], kept: list[Holding] | None = None) -> list[Inventory]:
    inventories = [Inventory(node, tuple(holdings)) for node, holdings in enumerate(nodes)]
    return [*inventories, Inventory(PERSISTENT, tuple(kept))] if kept is not None else inventories


def chosen(choice: RecoveryChoice) -> RecoveryPlan:
    assert choice.plan is not None, choice.passed
    return choice.plan


def order(choice: RecoveryChoice) -> tuple[int, int]:
    return chosen(choice).manifest.step, chosen(choice).manifest.epoch


def everything(state: SavedState, protected: bool = True) -> list[list[Holding]]:
    return [[held(state, m, protected=protected)] for m in range(len(state.manifest.members))]


def test_a_complete_save_needs_nothing() -> None:
    state = saved_state(FOUR)
    found = chosen(choose(world(*everything(state))))
    assert found.complete and found.manifest == state.manifest
    assert found.sources["__0_0.distcp"] == 0 and found.sources["__5_0.distcp"] == 3
    assert set(found.sources) == {item.name for item in state.manifest.items()}
    assert found.homes == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("scheme", ["partner", "xor", "rs"])
@pytest.mark.parametrize("gone", range(4))
def test_a_new_node_takes_the_place_of_a_lost_one(scheme: str, gone: int) -> None:
    state = saved_state(FOUR, scheme=scheme)
    nodes = everything(state)
    nodes[gone] = []
    found = chosen(choose(world(*nodes)))
    assert found.tasks == (RebuildTask(gone, gone, (gone,), (gone,)),)
    assert {found.sources[item.name] for item in state.manifest.members[gone].items} == {gone}
    assert found.bare == {gone: gone}


def test_fewer_nodes_share_what_has_to_be_rebuilt() -> None:
    state = saved_state(FOUR, size=2)  # sets (0, 2) and (1, 3)
    found = chosen(choose(world(*everything(state)[2:])))
    assert [(t.member, t.node) for t in found.tasks] == [(0, 0), (1, 1)]
    assert found.homes == {2: 0, 3: 1}  # nodes are numbered anew
    assert found.bare == {}  # whoever takes a member in keeps its own redundancy only


def test_more_nodes_than_before() -> None:
    state = saved_state(FOUR)
    found = chosen(choose(world([], *everything(state)[1:], [])))
    assert [(t.member, t.node) for t in found.tasks] == [(0, 0)]


def test_a_damaged_file_is_rebuilt_on_its_own_node() -> None:
    state = saved_state(FOUR)
    nodes = everything(state)
    nodes[1] = [held(state, 1, without="__2_0.distcp")]
    found = chosen(choose(world(*nodes, [])))
    assert found.tasks == (RebuildTask(1, 1, (1,), ()),)
    assert found.homes[1] == 1


def test_two_lost_nodes_of_a_set_send_the_run_back() -> None:
    old, new = saved_state(FOUR, step=100), saved_state(FOUR, step=120)
    nodes = [[*a, *b] for a, b in zip(everything(old), everything(new), strict=True)]
    nodes[1], nodes[3] = [nodes[1][0]], [nodes[3][0]]
    choice = choose(world(*nodes))
    assert order(choice) == (100, 1)
    [passed] = choice.passed
    assert passed.name == "step-00000120-epoch-1"
    assert "the data of 1 (node1), 3 (node3) is lost or damaged" in passed.why
    assert "scheme xor cannot rebuild it" in passed.why


def test_two_lost_nodes_are_rebuilt_by_rs_and_three_are_not() -> None:
    state = saved_state([*FOUR, [3]], scheme="rs")
    nodes = everything(state)
    nodes[1] = nodes[2] = []
    tasks = chosen(choose(world(*nodes))).tasks
    assert tasks == (RebuildTask(1, 1, (1, 2), (1, 2)), RebuildTask(2, 2, (1, 2), (1, 2)))
    nodes[4] = []
    [passed] = choose(world(*nodes)).passed
    assert "the data of 1 (node1), 2 (node2), 4 (node4) is lost or damaged" in passed.why
    assert "scheme rs cannot rebuild it" in passed.why


def test_partners_that_are_no_neighbours_may_both_be_lost() -> None:
    state = saved_state(FOUR, scheme="partner")
    nodes = everything(state)
    nodes[0] = nodes[2] = []
    assert [t.member for t in chosen(choose(world(*nodes))).tasks] == [0, 2]
    nodes[1] = []
    assert choose(world(*nodes)).plan is None


def test_a_save_that_was_not_protected_in_time_is_passed_over() -> None:
    old, new = saved_state(FOUR, step=100), saved_state(FOUR, step=120)
    nodes = [
        [*a, *b] for a, b in zip(everything(old), everything(new, protected=False), strict=True)
    ]
    assert order(choose(world(*nodes))) == (120, 1)
    assert chosen(choose(world(*nodes))).bare == {0: 0, 1: 1, 2: 2, 3: 3}
    nodes[2] = []
    choice = choose(world(*nodes))
    assert order(choice) == (100, 1)
    assert "redundancy is missing at 0 (node0), 1 (node1), 3 (node3)" in choice.passed[0].why


def test_single_survives_no_loss_of_a_node_but_has_the_persistent_level() -> None:
    flushed, new = saved_state(FOUR, step=100, scheme="single"), saved_state(FOUR, scheme="single")
    nodes = everything(new, protected=False)
    assert chosen(choose(world(*nodes))).bare == {}
    nodes[0] = []
    choice = choose(world(*nodes, kept=[persistent(flushed)]))
    assert order(choice) == (100, 1) and set(chosen(choice).sources.values()) == {PERSISTENT}
    assert "scheme single cannot rebuild" in choice.passed[0].why


def test_levels_complete_each_other() -> None:
    state = saved_state(FOUR)
    nodes = everything(state)
    nodes[0] = nodes[1] = []  # more than xor can rebuild
    half = persistent(state, without="__4_0.distcp __5_0.distcp __6_0.distcp .metadata")
    found = chosen(choose(world(*nodes, kept=[half])))
    assert found.complete
    assert found.sources["__0_0.distcp"] == PERSISTENT and found.sources["__5_0.distcp"] == 3
    assert found.sources[METADATA] == 2


def test_what_is_on_the_persistent_level_cannot_be_read_by_the_arithmetic() -> None:
    state = saved_state(FOUR)
    nodes = everything(state)
    nodes[0] = nodes[1] = []
    only_zero = persistent(state, without="__2_0.distcp __3_0.distcp")
    assert choose(world(*nodes, kept=[only_zero])).plan is None


def test_the_metadata_is_needed() -> None:
    state = saved_state(FOUR)
    nodes = [[held(state, m, without=METADATA)] for m in range(4)]
    choice = choose(world(*nodes))
    assert choice.plan is None and "no node has its .metadata" in choice.passed[0].why
    nodes[3] = [held(state, 3)]
    assert chosen(choose(world(*nodes))).sources[METADATA] == 3


def test_a_stale_cache_never_wins() -> None:
    run = RunHistory("r", (Start(1), Start(2, (100, 1))))
    old, stale, new = (
        saved_state(FOUR, step=s, epoch=e) for s, e in ((100, 1), (400, 1), (150, 2))
    )
    nodes = [[held(old, m), held(new, m)] for m in range(4)]
    nodes[2].append(held(stale, 2))
    assert order(choose(world(*nodes), holds=run.holds)) == (150, 2)
    # Even if all of it is there, and nothing newer is:
    nodes = [[held(old, m), held(stale, m)] for m in range(4)]
    choice = choose(world(*nodes), holds=run.holds)
    assert order(choice) == (100, 1)
    assert "a later start of the run went on from before it" in str(choice.passed[0])


def test_a_later_start_counts_more_than_a_later_step_where_no_record_is_left() -> None:
    early, late = saved_state(FOUR, step=400, epoch=1), saved_state(FOUR, step=150, epoch=2)
    nodes = [[held(early, m), held(late, m)] for m in range(4)]
    assert order(choose(world(*nodes))) == (150, 2)


def test_what_failed_is_not_tried_again() -> None:
    old, new = saved_state(FOUR, step=100), saved_state(FOUR, step=120)
    nodes = [[*a, *b] for a, b in zip(everything(old), everything(new), strict=True)]
    choice = choose(world(*nodes), failed={new.manifest.name: "its parity is damaged"})
    assert order(choice) == (100, 1)
    assert str(choice.passed[0]) == "step-00000120-epoch-1: its parity is damaged"


def test_two_saves_of_one_step_are_not_mixed() -> None:
    first, second = saved_state(FOUR, save="a"), saved_state(FOUR, save="b")
    nodes = [[held(first, 0)], [held(first, 1)], [held(second, 2)], [held(second, 3)]]
    choice = choose(world(*nodes))
    assert choice.plan is None and len(choice.passed) == 2
    assert len(candidates(h.manifest for node in nodes for h in node)) == 2


def test_a_node_without_its_manifest_gets_it_before_it_serves() -> None:
    state = saved_state(FOUR)
    nodes = everything(state)
    nodes[1] = [replace(held(state, 1), readable=False)]
    found = chosen(choose(world(*nodes)))
    assert found.tasks == (RebuildTask(1, 1, (), ()),) and found.sources["__2_0.distcp"] == 1


def test_nothing_at_all() -> None:
    assert choose(world([], [])) == RecoveryChoice(None, ())
    assert choose([]) == RecoveryChoice(None, ())


def test_without_nodes_nothing_is_rebuilt() -> None:
    state = saved_state(FOUR)
    with pytest.raises(Unrecoverable):
        plan(state.manifest, world(kept=[persistent(state, without="__0_0.distcp")]))


def test_an_inventory_travels_as_text() -> None:
    inventory = replace(world(*everything(saved_state(FOUR)))[2], broken={"x": "why"})
    assert Inventory.parse(inventory.to_json()) == inventory


@given(
    st.sampled_from(["partner", "xor", "rs"]),
    st.lists(st.sets(st.sampled_from(["data", "redundancy", "metadata"])), min_size=4, max_size=4),
)
def test_a_plan_reads_only_what_is_there(scheme: str, missing: list[set[str]]) -> None:
    state = saved_state(FOUR, scheme=scheme)
    good: list[set[str]] = []
    for member, parts in enumerate(missing):
        names = set(held(state, member).good)
        for item in state.manifest.members[member].items if "data" in parts else ():
            names.discard(item.name)
        names -= {redundancy_name(member)} if "redundancy" in parts else set()
        names -= {METADATA} if "metadata" in parts else set()
        good.append(names)
    nodes = [[replace(held(state, m), good=frozenset(names))] for m, names in enumerate(good)]
    choice = choose(world(*nodes))
    lost = {m for m in range(4) if "data" in missing[m]}
    # How many may be missing at most, counted naively: that much always comes back.
    if all("metadata" in parts for parts in missing) or (choice.plan is None):
        borne = scheme_named(scheme).tolerates(4)
        assert len([m for m in missing if m]) > borne or choice.plan is not None
        return
    assert {task.member for task in chosen(choice).tasks} == lost
    for task in chosen(choice).tasks:
        assert set(task.lost) == lost
        assert set(task.bare) == {m for m in range(4) if "redundancy" in missing[m]}
