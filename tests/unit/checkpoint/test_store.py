"""Stores of generations: what is a checkpoint, what is wrong with it, and what may go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import MANIFEST, RUN, State, generation_name
from fivefold.checkpoint.place import LocalPlace
from fivefold.checkpoint.run import RunHistory, Start
from fivefold.checkpoint.store import Generation, LocalStore, PersistentStore, surplus
from fivefold.errors import CheckpointError, Damaged, UsageError
from saves import RUN_ID, manifest_of, save_flushed, save_local

PLACE = LocalPlace(Path("nowhere"))


def local(root: Path) -> LocalStore:
    return LocalStore(root, RUN_ID)


def names(generations: list[Generation]) -> list[str]:
    return [generation.name for generation in generations]


def test_a_generation_passes_through_its_states(tmp_path: Path) -> None:
    store = local(tmp_path)
    path = store.begin(120, 1)
    assert path == tmp_path / RUN_ID / "step-00000120-epoch-1"
    (found,) = store.generations()
    assert found.manifest is None and found.problem == "it has no manifest: the save did not end"
    saved = save_local(tmp_path, 120)
    (found,) = store.generations()
    assert (
        found.manifest == saved.manifest and found.manifest and found.manifest.state == "protected"
    )
    assert found.path == path and store.verify(found) == []
    assert store.advance(found, "local").manifest == found.manifest, "states only advance"
    flushed = store.advance(found, "flushed").manifest
    assert (
        flushed and flushed.state == "flushed" and flushed.redundancy == found.manifest.redundancy
    )


def test_a_step_is_saved_once_per_start(tmp_path: Path) -> None:
    save_local(tmp_path, 120)
    with pytest.raises(CheckpointError, match="was saved already"):
        local(tmp_path).begin(120, 1)
    local(tmp_path).begin(120, 2)


def test_what_an_earlier_attempt_left_is_removed(tmp_path: Path) -> None:
    store = local(tmp_path)
    (store.begin(120, 1) / "__0_0.distcp").write_bytes(b"torn")
    assert list(store.begin(120, 1).iterdir()) == []


def test_a_manifest_is_written_only_over_files_that_are_there(tmp_path: Path) -> None:
    store = local(tmp_path)
    store.begin(120, 1)
    with pytest.raises(
        CheckpointError, match=r"cannot be committed: __0_0.distcp: it is not there"
    ):
        store.commit(manifest_of(120, me=0, redundancy=False))
    generation = save_local(tmp_path, 121, redundancy=False)
    with pytest.raises(CheckpointError, match=r"redundancy-0.bin: it is not there"):
        store.advance(generation, "protected", manifest_of(121, me=0).redundancy)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        store.advance(replace(generation, step=120), "protected")


def test_generations_are_in_order_and_other_names_left_alone(tmp_path: Path) -> None:
    for step, epoch in ((300, 1), (200, 2), (100, 1)):
        save_local(tmp_path, step, epoch)
    (tmp_path / RUN_ID / "notes").mkdir()
    assert names(local(tmp_path).generations()) == [
        generation_name(100, 1), generation_name(300, 1), generation_name(200, 2),
    ]  # fmt: skip
    assert LocalStore(tmp_path, "another").generations() == []


def test_a_manifest_of_another_run_or_place_is_foreign(tmp_path: Path) -> None:
    generation = save_local(tmp_path, 100)
    generation.path.rename(generation.path.with_name(generation_name(101, 1)))
    (found,) = local(tmp_path).generations()
    assert found.manifest is None and "it was copied or renamed" in found.problem
    (tmp_path / RUN_ID).rename(tmp_path / "other")
    (found,) = LocalStore(tmp_path, "other").generations()
    assert found.manifest is None


def test_run_ids_are_names_of_directories(tmp_path: Path) -> None:
    for bad in ("", "..", "a/b", ".a", "a" * 101, "ä"):
        with pytest.raises(UsageError, match="run id"):
            LocalStore(tmp_path, bad)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "redundancy-0.bin"])
def test_every_way_in_which_a_file_can_be_wrong_is_found(name: str, tmp_path: Path) -> None:
    store, generation = local(tmp_path), save_local(tmp_path, 100)
    path = generation.path / name
    good = path.read_bytes()

    def problem(deep: bool) -> list[str]:
        return [f"{p.name} {p.what}" for p in store.verify(generation, deep)]

    path.write_bytes(good[:-1])
    assert problem(deep=False) == [f"{name} length"]
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert problem(deep=True) == [f"{name} digest"] and problem(deep=False) == []
    path.unlink()
    assert problem(deep=False) == [f"{name} missing"]
    path.mkdir()
    assert problem(deep=True) in ([f"{name} length"], [f"{name} unreadable"])
    path.rmdir()
    path.write_bytes(good)
    assert problem(deep=True) == []


def test_a_dropped_generation_loses_its_manifest_first(tmp_path: Path) -> None:
    class Failing(FileOps):
        def remove_tree(self, path: Path) -> None:  # noqa: ARG002
            raise OSError("injected")

    generation = save_local(tmp_path, 100)
    with pytest.raises(OSError, match="injected"):
        LocalStore(tmp_path, RUN_ID, Failing()).drop(generation)
    (found,) = local(tmp_path).generations()
    assert found.manifest is None and (found.path / "__0_0.distcp").exists()
    local(tmp_path).drop(found)
    assert local(tmp_path).generations() == []


# ---- what may go


def made(step: int, epoch: int = 1, state: State | None = "protected") -> Generation:
    manifest = manifest_of(step, epoch, me=0)
    return Generation(PLACE, step, epoch, None if state is None else replace(manifest, state=state))


@pytest.mark.parametrize(
    ("states", "gone"),
    [
        ("ppp", [1]),
        ("ppl", [1]),        # 3 is on its node alone, 2 is safe
        ("pll", []),         # neither 2 nor 3 is safe yet
        ("lll", []),
        ("ffffp", [1, 2, 3]),
        ("p-pp", [1, 2]),    # what was never finished goes with the old ones
        ("pp-", []),         # and stays while it may be under way
        ("pp-l", [1]),
    ],
)  # fmt: skip
def test_no_generation_goes_before_a_newer_one_is_protected(states: str, gone: list[int]) -> None:
    meaning: dict[str, State | None] = {"p": "protected", "f": "flushed", "l": "local", "-": None}
    generations = [made(step, state=meaning[s]) for step, s in enumerate(states, start=1)]
    assert [g.step for g in surplus(generations, 2)] == gone


def test_a_dead_end_of_an_earlier_start_neither_counts_nor_protects() -> None:
    """The run went on from 200, for 300 could not be recovered: 200 must stay until 210 is safe."""
    run = RunHistory(RUN_ID, (Start(1), Start(2, (200, 1))))
    generations = [made(100), made(200), made(300), made(210, 2, "local")]
    assert surplus(generations, 2, run=run) == [generations[0]]
    generations[-1] = made(210, 2)
    assert surplus(generations, 2, run=run) == [generations[0], generations[2]]


def test_what_is_busy_stays() -> None:
    generations = [made(step) for step in range(1, 6)]
    gone = surplus(generations, 2, busy=[generation_name(2, 1)])
    assert [g.step for g in gone] == [1, 3]


def test_at_least_two_stay() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        surplus([], 1)


@given(
    st.lists(st.sampled_from(["local", "protected", "flushed", None]), max_size=8),
    st.integers(2, 4),
)
def test_dropping_never_loses_what_is_needed(states: list[State | None], keep: int) -> None:
    generations = [made(step, state=state) for step, state in enumerate(states, start=1)]
    gone = surplus(generations, keep)
    left = [g for g in generations if g not in gone]
    valid = [g for g in generations if g.manifest is not None]
    safe = [g for g in valid if g.manifest and g.manifest.state != "local"]
    assert [g for g in left if g.manifest][-keep:] == valid[-keep:]
    assert not safe or safe[-1] in left
    assert all(g in left for g in valid if not safe or g.order >= safe[-1].order)
    assert surplus(left, keep) == []


def test_keep_drops_from_the_disk(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save_local(tmp_path, step)
    assert [g.step for g in local(tmp_path).keep(3)] == [100]
    assert [g.step for g in local(tmp_path).generations()] == [200, 300, 400]


# ---- the persistent directory

URLS = pytest.mark.parametrize("kind", ["path", "file", "memory"])


def url_of(kind: str, folder: Path) -> str:
    return {"path": str(folder), "file": f"file://{folder}", "memory": f"memory:/{folder}"}[kind]


@URLS
def test_a_persistent_directory_holds_the_files_of_all_nodes(kind: str, tmp_path: Path) -> None:
    url = url_of(kind, tmp_path / "a")
    store = PersistentStore(url)
    assert store.generations() == [] and store.read_run() is None
    saved = save_flushed(url, 120)
    (found,) = PersistentStore(url).generations()
    assert found.manifest == saved.manifest and store.verify(found) == []
    with store.open(found, "__1_0.distcp") as file:
        file.seek(150)
        assert len(file.read()) == 50
    store.place.write(f"{found.name}/__1_0.distcp", [bytes(200)])
    assert [p.what for p in store.verify(found)] == ["digest"]
    store.place.remove(f"{found.name}/.metadata")
    assert [p.what for p in store.verify(found)] == ["digest", "missing"]
    with pytest.raises(CheckpointError, match="cannot be committed"):
        store.commit(manifest_of(120, me=None))
    store.drop(found)
    assert store.generations() == []


@URLS
def test_the_record_of_a_run_survives_its_damage(kind: str, tmp_path: Path) -> None:
    store = PersistentStore(url_of(kind, tmp_path / "a"))
    run = RunHistory(RUN_ID, ()).started(None).started((100, 1))
    store.write_run(run)
    assert store.read_run() == run
    store.place.write(RUN, [b"{"])
    with pytest.warns(UserWarning, match="its copy is used instead"):
        assert store.read_run() == run
    store.place.write("run-copy.json", [b"{"])
    with pytest.raises(Damaged, match=r"the record of the run in .* and so is its copy; restore"):
        store.read_run()


def test_a_record_that_is_missing_beside_checkpoints_is_told(tmp_path: Path) -> None:
    save_flushed(tmp_path, 120)
    with pytest.raises(Damaged, match="it is missing; restore the file"):
        PersistentStore(tmp_path).read_run()


def test_the_copy_of_the_record_is_never_older(tmp_path: Path) -> None:
    class Failing(FileOps):
        def rename(self, source: Path, target: Path) -> None:
            if target.name == RUN:
                raise OSError("injected")
            super().rename(source, target)

    run = RunHistory(RUN_ID, ()).started(None)
    PersistentStore(tmp_path).write_run(run)
    with pytest.raises(OSError, match="injected"):
        PersistentStore(tmp_path, Failing()).write_run(run.started((100, 1)))
    assert PersistentStore(tmp_path).read_run() == run
    (tmp_path / RUN).unlink()
    with pytest.warns(UserWarning, match="its copy"):
        assert PersistentStore(tmp_path).read_run() == run.started((100, 1))


def test_names_do_not_lead_out_of_a_place(tmp_path: Path) -> None:
    for name in ("..", "a/../b", "/etc", "a//b", "a\0"):
        with pytest.raises(UsageError, match="is no name below"):
            LocalPlace(tmp_path).read(name)


def test_urls_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nosuch"):
        PersistentStore("nosuch://a/b")


# ---- runs


def test_a_run_knows_its_dead_ends() -> None:
    run = RunHistory(RUN_ID, (Start(1), Start(2, (200, 1)), Start(3, (200, 1)), Start(4, (250, 3))))
    held = {(step, epoch) for step in (100, 200, 250, 300) for epoch in range(1, 6)
            if run.holds(step, epoch)}  # fmt: skip
    assert held == {
        (100, 1), (200, 1),
        (100, 3), (200, 3), (250, 3),
        *((step, epoch) for step in (100, 200, 250, 300) for epoch in (4, 5)),
    }  # fmt: skip
    assert not RunHistory(RUN_ID, (Start(1), Start(2))).holds(100, 1), "it began anew"
    assert RunHistory(RUN_ID, ()).holds(100, 1)


def test_a_record_is_read_back_and_checked() -> None:
    run = RunHistory(RUN_ID, ()).started(None).started((100, 1)).started((100, 1), epoch=7)
    assert RunHistory.parse(run.to_json()) == run and run.epoch == 7
    for wrong in (
        RunHistory(RUN_ID, (Start(2), Start(1))),
        RunHistory(RUN_ID, (Start(1), Start(1))),
        RunHistory(RUN_ID, (Start(1, (5, 1)),)),
        RunHistory("../x", (Start(1),)),
    ):
        with pytest.raises(Damaged, match="it makes no sense"):
            RunHistory.parse(wrong.to_json())
    data = run.to_json().encode()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(Damaged):
            RunHistory.parse(bytes(flipped))


def test_there_are_manifests_only_where_a_save_ended(tmp_path: Path) -> None:
    generation = save_local(tmp_path, 100)
    (generation.path / MANIFEST).write_bytes(b"")
    (found,) = local(tmp_path).generations()
    assert found.manifest is None and "is damaged" in found.problem
    assert [p.name for p in local(tmp_path).verify(found)] == [MANIFEST]
