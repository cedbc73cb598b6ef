"""A node loses power at any moment of a save: with the others it has every checkpoint again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fivefold.checkpoint.manifest import MANIFEST, generation_name, redundancy_name
from fivefold.checkpoint.repair import NodeDirectories
from fivefold.checkpoint.store import LocalStore
from saves import RUN_ID, bytes_of, manifest_of
from torn import Operation, Recorded, Tree, materialize, states_after_a_crash

LENGTHS = (301, 200, 177)
STEPS = (100, 120)


def nodes_with_saves(root: Path) -> list[Path]:
    """Three nodes with two saves each, protected by xor."""
    nodes = [root / f"node{n}" for n in range(len(LENGTHS))]
    for number, node in enumerate(nodes):
        store = LocalStore(node, RUN_ID)
        for step in STEPS:
            saved = manifest_of(step, me=number, lengths=LENGTHS, redundancy=False)
            store.begin(step, 1)
            for item in saved.items():
                data = bytes_of(step, item.name, item.length)
                store.place.write(f"{saved.name}/{item.name}", [data])
            store.commit(saved)
    bench = NodeDirectories(nodes)
    for save in bench.saves():
        assert bench.repair(save).problem == ""
    return nodes


def saved_again(node: Path, root: Path) -> list[Operation]:
    """What happens on the disk of node 0 as it saves the same."""
    files = Recorded()
    root.mkdir()
    store = LocalStore(root, RUN_ID, files)
    for step in STEPS:
        found = LocalStore(node, RUN_ID).find(generation_name(step, 1))
        assert found is not None and found.manifest is not None
        store.begin(step, 1)

        def write(name: str, found_path: Path = found.path) -> None:
            data = (found_path / name).read_bytes()
            store.place.write(f"{found_path.name}/{name}", [data])

        plain = replace(found.manifest, redundancy=(), state="local")
        for item in plain.items():
            write(item.name)
        generation = store.commit(plain)
        write(redundancy_name(0))
        store.advance(generation, "protected", found.manifest.redundancy)
    return files.operations


def different_states(operations: list[Operation], root: Path) -> Iterator[Tree]:
    seen: set[str] = set()
    for left in states_after_a_crash(operations, root):
        if (key := repr(left.tree)) not in seen:
            seen.add(key)
            yield left.tree


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".tmp")
    }  # fmt: skip


def test_a_node_that_lost_power_is_made_whole_by_the_others(tmp_path: Path) -> None:
    nodes = nodes_with_saves(tmp_path)
    good = content(nodes[0])
    assert len(good) == len(STEPS) * 4
    states = list(different_states(saved_again(nodes[0], tmp_path / "first"), tmp_path / "first"))
    assert len(states) > 40
    again = tmp_path / "again"
    for state in states:
        shutil.rmtree(again, ignore_errors=True)
        materialize(state, again)
        bench = NodeDirectories([again, *nodes[1:]])
        for save in bench.saves():
            mended = bench.repair(save)
            assert mended.problem == ""
            assert all(str(again) in path for path in mended.made)
        assert content(again) == good


def test_the_save_that_a_node_lost_with_its_manifest_is_known_by_the_others(tmp_path: Path) -> None:
    nodes = nodes_with_saves(tmp_path)
    for path in nodes[0].rglob(MANIFEST):
        path.write_bytes(path.read_bytes()[:50])
    directories = NodeDirectories(nodes)
    newest, older = directories.saves()
    assert [newest.step, older.step] == [120, 100]
    assert NodeDirectories([nodes[0], nodes[2]]).repair(newest).problem != "", "1 is missing"
    assert directories.repair(newest).problem == ""
