"""Checkpoints are made whole from what is left of them: real files, the run's own code, no run."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.checkpoint.manifest import MANIFEST, Manifest, State
from fivefold.checkpoint.place import LocalPlace
from fivefold.checkpoint.repair import NodeDirectories
from fivefold.checkpoint.store import LocalStore, PersistentStore, Store
from fivefold.errors import CheckpointError, Foreign, InUse, UsageError
from saves import RUN_ID, bytes_of, manifest_of

LENGTHS = (3001, 0, 2000, 1777)
STEP = 120
NAME = "step-00000120-epoch-1"


def manifest(number: int | None, scheme: str = "xor", state: State = "local") -> Manifest:
    made = manifest_of(STEP, me=number, lengths=LENGTHS, redundancy=False, scheme=scheme)
    return replace(made, state=state)


class Disks:
    """Four nodes and a persistent directory, with one save on all of them."""

    def __init__(self, root: Path, scheme: str = "xor") -> None:
        self.nodes = [root / f"node{n}" for n in range(len(LENGTHS))]
        self.far = root / "far"
        for number, node in enumerate(self.nodes):
            store = LocalStore(node, RUN_ID)
            store.begin(STEP, 1)
            saved = manifest(number, scheme)
            for item in saved.items():
                store.place.write(f"{NAME}/{item.name}", [bytes_of(STEP, item.name, item.length)])
            store.commit(saved)
        self.saved = self.bench().saves()[0]
        self.protected = self.bench().repair(self.saved)
        self.bench(far=True).flush(self.saved)

    def bench(self, *, far: bool = False) -> NodeDirectories:
        nodes = [node for node in self.nodes if node.is_dir()]
        return NodeDirectories(nodes, PersistentStore(self.far) if far else None)

    def folder(self, node: int) -> Path:
        return self.nodes[node] / RUN_ID / NAME

    def stores(self) -> Iterator[Store]:
        yield from (LocalStore(node, RUN_ID) for node in self.nodes)
        yield PersistentStore(self.far)

    def files(self) -> list[Path]:
        return sorted(p for d in (*self.nodes, self.far) for p in d.rglob("step-*/*"))

    def content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.files()}


@pytest.fixture(params=["xor", "partner", "rs"])
def disks(request: pytest.FixtureRequest, tmp_path: Path) -> Disks:
    return Disks(tmp_path, request.param)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_protecting_is_repairing_too(disks: Disks) -> None:
    assert [Path(path).name for path in disks.protected.made] == [
        f"redundancy-{n}.bin" for n in range(len(LENGTHS))
    ]
    for store in disks.stores():
        (generation,) = store.generations()
        assert generation.manifest and generation.manifest.state != "local"
        assert store.verify(generation) == []
    assert disks.bench(far=True).repair(disks.saved).made == ()


def test_any_lost_node_is_rebuilt_on_an_empty_disk(disks: Disks) -> None:
    good = disks.content()
    for node in disks.nodes:
        shutil.rmtree(node)
        node.mkdir()
        mended = disks.bench().repair(disks.saved)
        assert mended.problem == "" and mended.made
        assert disks.content().keys() == good.keys()
        assert all(data == good[path] for path, data in disks.content().items()
                   if path.name != MANIFEST)  # fmt: skip
        (generation,) = LocalStore(node, RUN_ID).generations()
        assert generation.manifest and generation.manifest.state == "protected"


def test_any_two_lost_nodes_are_rebuilt_on_empty_disks(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "rs")
    good = {path: data for path, data in disks.content().items() if path.name != MANIFEST}
    for pair in itertools.combinations(disks.nodes, 2):
        for node in pair:
            shutil.rmtree(node)
            node.mkdir()
        mended = disks.bench().repair(disks.saved)
        assert mended.problem == "" and mended.made
        assert {p: d for p, d in disks.content().items() if p.name != MANIFEST} == good


def test_a_lost_node_and_damaged_redundancy_of_another_are_rebuilt(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "rs")
    good = {path: data for path, data in disks.content().items() if path.name != MANIFEST}
    for lost, other in itertools.permutations(range(len(LENGTHS)), 2):
        flip(disks.folder(other) / f"redundancy-{other}.bin", 99)
        shutil.rmtree(disks.nodes[lost])
        disks.nodes[lost].mkdir()
        assert disks.bench().repair(disks.saved).problem == ""
        assert {p: d for p, d in disks.content().items() if p.name != MANIFEST} == good


def test_what_lies_nowhere_else_comes_from_the_persistent_directory(disks: Disks) -> None:
    for node in (0, 2, 3):
        shutil.rmtree(disks.nodes[node])
        disks.nodes[node].mkdir()
    mended = disks.bench().repair(disks.saved)
    assert "cannot" in mended.problem or "lost" in mended.problem
    assert disks.bench(far=True).repair(disks.saved).problem == ""
    for store in disks.stores():
        (generation,) = store.generations()
        assert generation.manifest and store.verify(generation) == []


def test_the_persistent_directory_is_repaired_from_the_nodes(disks: Disks) -> None:
    good = disks.content()
    (disks.far / NAME / "__0_0.distcp").write_bytes(b"")
    (disks.far / NAME / ".metadata").unlink()
    (disks.far / NAME / MANIFEST).unlink()
    mended = disks.bench(far=True).repair(disks.saved)
    assert mended.problem == "" and len(mended.made) == 3
    assert disks.content() == good


def test_no_damage_is_passed_on_into_redundancy(tmp_path: Path) -> None:
    """Data and redundancy are damaged beyond repair: what is left of the redundancy stays as it is."""
    disks = Disks(tmp_path, "partner")
    flip(disks.folder(2) / "__2_0.distcp", 77)  # its copy is at 3
    flip(disks.folder(3) / "redundancy-3.bin", 5)
    before = disks.content()
    mended = disks.bench().repair(disks.saved)
    assert "member 2" in mended.problem or "needs the data of members 2" in mended.problem
    assert mended.made == () and disks.content() == before


def test_another_save_of_that_step_is_left_alone(disks: Disks) -> None:
    shutil.rmtree(disks.nodes[1])
    store = LocalStore(disks.nodes[1], RUN_ID)
    store.begin(STEP, 1)
    other = replace(manifest(1), save="another")
    for item in other.items():
        store.place.write(f"{NAME}/{item.name}", [bytes_of(STEP, item.name, item.length)])
    store.commit(other)
    before = {p: d for p, d in disks.content().items() if disks.nodes[1] in p.parents}
    bench = disks.bench()
    for save in bench.saves():
        bench.repair(save)
    assert {p: d for p, d in disks.content().items() if disks.nodes[1] in p.parents} == before


# ---- bit flips


@pytest.mark.parametrize(
    "flips", [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_all_flipped_bits_are_noticed(flips: int, tmp_path: Path) -> None:
    """Every class of file, on the nodes and in the persistent directory."""
    disks = Disks(tmp_path)
    stores = {p: s for s in disks.stores() if isinstance(s.place, LocalPlace)
              for p in (s.place.path(NAME)).iterdir()}  # fmt: skip
    files = [path for path in disks.files() if path.stat().st_size]
    classes = {re.sub("[0-9]+", "N", path.name) for path in files}
    assert classes == {"__N_N.distcp", ".metadata", "redundancy-N.bin", MANIFEST}
    chance = random.Random(0)
    for number in range(flips):
        path = files[number % len(files)]
        good = path.read_bytes()
        flip(path, chance.randrange(8 * len(good)))
        generation = stores[path].find(NAME)
        assert generation is not None and stores[path].verify(generation), path
        path.write_bytes(good)


def test_flipped_bits_are_repaired(disks: Disks) -> None:
    good = disks.content()
    chance = random.Random(1)
    for path in [path for path in disks.files() if path.stat().st_size]:
        flip(path, chance.randrange(8 * path.stat().st_size))
        mended = disks.bench(far=True).repair(disks.saved)
        assert mended.problem == "" and str(path) in mended.made
        now = disks.content()
        assert (
            {p for p in now if now[p] != good[p]} <= {path}
            if path.name == MANIFEST
            else now == good
        )
        good = now


# ---- flushing and fetching


def test_flushing_completes_what_was_begun(disks: Disks) -> None:
    (disks.far / NAME / MANIFEST).unlink()
    (disks.far / NAME / "__3_0.distcp").unlink()
    made = disks.bench(far=True).flush(disks.saved).made
    assert [Path(path).name for path in made] == ["__3_0.distcp"]
    record = PersistentStore(disks.far).read_run()
    assert record and record.run == RUN_ID and record.epoch == 1


def test_flushing_needs_every_file(disks: Disks, tmp_path: Path) -> None:
    shutil.rmtree(disks.nodes[2])
    bench = NodeDirectories(
        [n for n in disks.nodes if n.is_dir()], PersistentStore(tmp_path / "new")
    )
    with pytest.raises(CheckpointError, match="is whole in none of these directories"):
        bench.flush(disks.saved)
    assert not (tmp_path / "new" / NAME / MANIFEST).exists()


def test_a_directory_of_another_run_is_refused(disks: Disks, tmp_path: Path) -> None:
    other = tmp_path / "other"
    store = PersistentStore(other)
    record = PersistentStore(disks.far).read_run()
    assert record is not None
    store.write_run(replace(record, run="another"))
    with pytest.raises(UsageError, match="of several runs: another, run-1"):
        NodeDirectories(disks.nodes, store)
    bench = disks.bench(far=True)
    bench.persistent = store
    with pytest.raises(Foreign, match="is of run another"):
        bench.flush(disks.saved)


def test_a_run_that_is_writing_is_not_disturbed(disks: Disks) -> None:
    from fivefold.checkpoint.lease import Lease

    with Lease(LocalPlace(disks.far)), pytest.raises(InUse, match="is written to by"):
        disks.bench(far=True).flush(disks.saved)


@pytest.mark.parametrize(("member", "names"), [(None, 4), (2, 1)])
def test_fetching(member: int | None, names: int, disks: Disks, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    bench = NodeDirectories([new], PersistentStore(disks.far))
    made = bench.fetch(bench.saves()[0], member).made
    assert len(made) == names + 1
    (generation,) = LocalStore(new, RUN_ID).generations()
    assert generation.manifest and generation.manifest.state == "flushed"
    assert LocalStore(new, RUN_ID).verify(generation) == []
    with pytest.raises(CheckpointError, match="is there already"):
        bench.fetch(bench.saves()[0], member)


def test_damaged_files_are_not_fetched(disks: Disks, tmp_path: Path) -> None:
    flip(disks.far / NAME / "__3_0.distcp", 9)
    new = tmp_path / "new"
    new.mkdir()
    bench = NodeDirectories([new], PersistentStore(disks.far))
    with pytest.raises(CheckpointError, match="is damaged"):
        bench.fetch(bench.saves()[0], None)
    (generation,) = LocalStore(new, RUN_ID).generations()
    assert generation.manifest is None and not (generation.path / "__3_0.distcp").exists()


def test_directories_may_be_those_of_the_run_itself(disks: Disks) -> None:
    flip(disks.folder(0) / "__0_0.distcp", 3)
    bench = NodeDirectories([node / RUN_ID for node in disks.nodes])
    assert bench.repair(bench.saves()[0]).problem == ""


def test_a_renamed_run_is_told(disks: Disks) -> None:
    renamed = (disks.nodes[0] / RUN_ID).rename(disks.nodes[0] / "renamed")
    with pytest.raises(UsageError, match="holds run run-1, but is not named so"):
        NodeDirectories([renamed])
    with pytest.raises(UsageError, match="no checkpoints"):
        NodeDirectories([disks.nodes[0]])
