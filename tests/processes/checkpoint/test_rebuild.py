"""Nodes are lost, files damaged, and rebuilt from what the others keep: agents as real processes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agents import MIB, THREE, WAIT_S, AgentNodes, content, plan_of
from fivefold.checkpoint.agent_client import AgentGone, Protection
from fivefold.checkpoint.encoding import Peers, protect, rebuild
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.inventory import stocktaking
from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.manifest import MANIFEST, METADATA
from fivefold.checkpoint.pieces import Server
from fivefold.checkpoint.recovery_plan import choose
from fivefold.checkpoint.schemes import scheme_named
from fivefold.checkpoint.store import LocalStore
from fivefold.errors import CheckpointError, Damaged, Unrecoverable
from fivefold.wire import new_key
from generations import saved_state


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[AgentNodes]:
    nodes = AgentNodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["partner", "xor"])
def test_every_node_comes_back_after_its_loss(nodes: AgentNodes, scheme: str) -> None:
    state = saved_state(THREE, scheme=scheme)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    before = [content(nodes.folder(node, state)) for node in range(3)]
    for lost in range(3):
        nodes.lose(lost)
        nodes.replace(lost)
        choice = nodes.choice()
        [made] = nodes.rebuild(choice)
        assert METADATA in made and MANIFEST in made
        nodes.protect(state)
        after = content(nodes.folder(lost, state))
        assert after == before[lost]
        # Once more: nothing to do, and the same bytes.
        assert nodes.rebuild(choice) == [[]]
        assert content(nodes.folder(lost, state)) == after


FIVE = [[2 * MIB + 1, 5], [MIB], [0], [7, 0, 3 * MIB - 3], [1]]
"""lengths of the files of five nodes"""


def test_any_two_nodes_come_back_after_their_loss(nodes: AgentNodes) -> None:
    state = saved_state(FIVE, scheme="rs")
    nodes.start(5)
    nodes.save(state)
    nodes.protect(state)
    before = [content(nodes.folder(node, state)) for node in range(5)]
    for pair in ((0, 3), (1, 2), (4, 0)):
        for lost in pair:
            nodes.lose(lost)
        for lost in pair:
            nodes.replace(lost)
        assert len(nodes.rebuild(nodes.choice())) == 2
        nodes.protect(state)
        assert [content(nodes.folder(node, state)) for node in range(5)] == before


def test_a_lost_node_and_redundancy_damaged_elsewhere_come_back(nodes: AgentNodes) -> None:
    state = saved_state(FIVE, scheme="rs")
    nodes.start(5)
    nodes.save(state)
    nodes.protect(state)
    before = content(nodes.folder(3, state))
    path = nodes.folder(4, state) / "redundancy-4.bin"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    nodes.lose(3)
    nodes.replace(3)
    choice = nodes.choice()
    [task] = plan_of(choice).tasks
    assert (task.lost, task.bare) == ((3,), (3, 4))
    nodes.rebuild(choice)
    nodes.protect(state)
    assert content(nodes.folder(3, state)) == before


def test_single_keeps_nothing_and_says_nothing(nodes: AgentNodes) -> None:
    state = saved_state([[10]], scheme="single")
    nodes.start(1)
    nodes.save(state)
    assert nodes.protect(state) == [Protection((), "")]


def test_damaged_files_are_rebuilt_in_place(nodes: AgentNodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        path = nodes.folder(0, state) / name
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    [problem, _] = nodes.agents[0].verify(state.manifest.name).result(WAIT_S)
    assert "__0_0.distcp" in problem
    assert nodes.rebuild(nodes.choice()) == [["__0_0.distcp", "__1_0.distcp"]]
    assert nodes.agents[0].verify(state.manifest.name).result(WAIT_S) == []


def test_a_damaged_manifest_comes_from_the_others(nodes: AgentNodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    path = nodes.folder(1, state) / MANIFEST
    path.write_bytes(path.read_bytes()[:-9])
    assert nodes.rebuild(nodes.choice()) == [[MANIFEST]]
    assert nodes.choice().plan == replace(plan_of(nodes.choice()), tasks=())


def test_a_surviving_node_takes_a_lost_member_in_and_serves_it(nodes: AgentNodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    nodes.lose(2)
    del nodes.agents[2]
    made = nodes.rebuild(nodes.choice())
    assert made == [[item.name for item in state.manifest.members[2].items]]
    assert content(nodes.folder(0, state))["__3_0.distcp"] == state.payload["__3_0.distcp"]
    again = nodes.choice()
    assert plan_of(again).complete and plan_of(again).sources["__3_0.distcp"] == 0


def test_nodes_with_other_numbers_protect_an_old_save_again(nodes: AgentNodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    before = content(nodes.folder(2, state))["redundancy-2.bin"]
    (nodes.folder(2, state) / "redundancy-2.bin").unlink()
    nodes.agents.reverse()
    nodes.meet()
    plan = plan_of(nodes.choice())
    assert plan.bare == {2: 0} and plan.homes == {0: 2, 1: 1, 2: 0}
    homes = {member: nodes.agents[node].address for member, node in plan.homes.items()}
    made = nodes.agents[0].protect(state.manifest.name, homes).result(WAIT_S)
    assert not made.problem
    assert content(nodes.folder(2, state))["redundancy-2.bin"] == before


def test_redundancy_that_is_damaged_makes_nothing_wrong(nodes: AgentNodes) -> None:
    """Not listed in a manifest, so nobody knows its digest: what comes out is compared."""
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    for agent in nodes.agents:
        assert not agent.protect(state.manifest.name).result(WAIT_S).problem
    for keeper in (0, 1):
        path = nodes.folder(keeper, state) / f"redundancy-{keeper}.bin"
        path.write_bytes(bytes(path.stat().st_size))
    nodes.lose(2)
    nodes.replace(2)
    choice = nodes.choice()
    with pytest.raises(CheckpointError, match=r"what was rebuilt of a file.*is damaged"):
        nodes.rebuild(choice)
    assert not any(name.endswith(".distcp") for name in content(nodes.folder(2, state)))


def test_too_much_lost_is_told(nodes: AgentNodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    choice = nodes.choice()
    nodes.lose(0)
    nodes.replace(0)
    task = nodes.choice().plan
    assert task is not None
    worse = replace(task.tasks[0], lost=(0, 1), bare=(0, 1))
    future = nodes.agents[0].rebuild(state.manifest, worse, {})
    with pytest.raises(Unrecoverable):
        future.result(WAIT_S)
    assert plan_of(choice).complete


def test_a_crash_while_rebuilding_is_made_good_by_the_next_attempt(
    nodes: AgentNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    nodes.lose(0)
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "rebuilding:3")
    nodes.replace(0)
    monkeypatch.delenv("FIVEFOLD_CRASH_AT")
    with pytest.raises(AgentGone):
        nodes.rebuild(nodes.choice())
    nodes.replace(0)
    nodes.rebuild(nodes.choice())
    assert plan_of(nodes.choice()).complete
    for item in state.manifest.members[0].items:
        assert (nodes.folder(0, state) / item.name).read_bytes() == state.payload[item.name]


# --- many sizes, without processes ------------------------------------------------------------


@contextmanager
def served(folders: list[Path], key: bytes) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Server("127.0.0.1", key, LocalReader(folder).answer))
            for folder in folders
        ]


@pytest.mark.parametrize("scheme", ["partner", "xor", "rs"])
@pytest.mark.parametrize("seed", range(8))
def test_random_saves_survive_losses_in_every_set(tmp_path: Path, scheme: str, seed: int) -> None:
    draw = random.Random(seed)
    least, many = scheme_named(scheme).least, scheme_named(scheme).tolerates(4)
    count, key, files = draw.randrange(least, 8 + least), new_key(), FileOps()
    lengths = [
        [draw.choice([0, 1, 7, 4096, draw.randrange(3 * MIB)]) for _ in range(draw.randrange(4))]
        for _ in range(count)
    ]
    state = saved_state(lengths, scheme=scheme, size=draw.randrange(least, 3 + least))
    manifest = state.manifest
    folders = [tmp_path / str(member) for member in range(count)]
    for member, folder in enumerate(folders):
        state.put(folder, member)
    with served(folders, key) as servers:
        everywhere = {member: server.address for member, server in enumerate(servers)}
        for folder in folders:
            protect(LocalReader(folder), manifest.name, Peers(everywhere, key), files)
    lost = {member for group in manifest.sets for member in draw.sample(group, many)}
    for member in lost:
        shutil.rmtree(folders[member])
    with served(folders, key) as servers:
        homes = {m: server.address for m, server in enumerate(servers) if m not in lost}
        for member in lost:
            reader, peers = LocalReader(folders[member]), Peers(homes, key)
            rebuild(reader, manifest, member, peers, files, lost=lost)
            for item in manifest.members[member].items:
                made = (reader.path(manifest.name) / item.name).read_bytes()
                assert made == state.payload[item.name]
            assert reader.manifest(manifest.name).me == member


def restarted(stores: list[LocalStore], key: bytes) -> None:
    """What a restart does on all nodes: look, choose, rebuild, protect again."""
    files = FileOps()
    shallow = [stocktaking(store, node, deep=False) for node, store in enumerate(stores)]
    known = [held.manifest for one in shallow for held in one.holdings]
    plan = plan_of(
        choose(
            [
                stocktaking(store, node, deep=True, elsewhere=known)
                for node, store in enumerate(stores)
            ]
        )
    )
    with served([store.root for store in stores], key) as servers:
        peers = Peers({m: servers[node].address for m, node in plan.homes.items()}, key)
        for task in plan.tasks:
            reader = LocalReader(stores[task.node].root)
            rebuild(
                reader, plan.manifest, task.member, peers, files, lost=task.lost, bare=task.bare
            )
        for node in plan.bare.values():
            made = protect(LocalReader(stores[node].root), plan.manifest.name, peers, files)
            found = stores[node].find(plan.manifest.name)
            assert found is not None
            stores[node].advance(found, "protected", made)


@pytest.mark.parametrize("scheme", ["partner", "xor", "rs"])
def test_any_flipped_bit_of_a_node_is_noticed_and_repaired(tmp_path: Path, scheme: str) -> None:
    draw, key = random.Random(scheme), new_key()
    state = saved_state([[90, 40], [70], [33], [11]], scheme=scheme)
    stores = [LocalStore(tmp_path / str(node), "r") for node in range(4)]
    for member, store in enumerate(stores):
        state.put(store.root, member)
    restarted(stores, key)  # protects
    whole = [content(store.root / state.manifest.name) for store in stores]
    assert all(len(files) == number for files, number in zip(whole, (5, 4, 4, 4), strict=True))
    for _ in range(30):
        node = draw.randrange(4)
        name = draw.choice(sorted(whole[node]))
        damaged = bytearray(whole[node][name])
        bit = draw.randrange(8 * len(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
        (stores[node].root / state.manifest.name / name).write_bytes(damaged)
        restarted(stores, key)
        if name == METADATA:  # others have it: a restart reads theirs, `repair` makes it whole
            (stores[node].root / state.manifest.name / name).write_bytes(whole[node][name])
        if name == MANIFEST:  # a new one does not know the redundancy beside it
            found = stores[node].find(state.manifest.name)
            assert found is not None and found.manifest is not None
            (stores[node].root / state.manifest.name / name).write_bytes(whole[node][name])
        assert content(stores[node].root / state.manifest.name) == whole[node]


@pytest.mark.parametrize(("scheme", "lost"), [("xor", {0}), ("rs", {0, 4})], ids=["xor", "rs"])
def test_damage_among_the_sources_never_passes_for_data(
    tmp_path: Path, scheme: str, lost: set[int]
) -> None:
    draw, key, files = random.Random(5), new_key(), FileOps()
    state = saved_state([[90, 40], [70], [33], [120], [80]][: 3 + len(lost)], scheme=scheme)
    folders = [tmp_path / str(member) for member in range(3 + len(lost))]
    for member, folder in enumerate(folders):
        state.put(folder, member)
    with served(folders, key) as servers:
        peers = Peers({member: server.address for member, server in enumerate(servers)}, key)
        for folder in folders:
            protect(LocalReader(folder), state.manifest.name, peers, files)
        refused = 0
        for attempt in range(90):
            source = folders[draw.randrange(1, 4)] / state.manifest.name
            path = source / draw.choice([n for n in content(source) if n != MANIFEST])
            before = path.read_bytes()
            damaged = bytearray(before)
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            reader = LocalReader(tmp_path / f"new{attempt}")
            try:
                rebuild(reader, state.manifest, 0, peers, files, lost=lost)
            except Damaged:
                refused += 1
            for item in state.manifest.members[0].items:
                made = reader.path(state.manifest.name) / item.name
                assert not made.exists() or made.read_bytes() == state.payload[item.name]
            path.write_bytes(before)
        assert refused > 20
