"""Old copies in the persistent directory go, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.checkpoint.manifest import MANIFEST, Manifest
from fivefold.checkpoint.run import RunHistory, Start
from fivefold.checkpoint.store import PersistentStore
from fivefold.checkpoint.writing import retain
from fivefold.errors import CheckpointError
from saves import RUN_ID, manifest_of, save_flushed

ONCE = RunHistory(RUN_ID, (Start(1),))


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a") if request.param == "path" else f"memory:/{tmp_path}/a"


def flushed(url: str, steps: Sequence[int], epoch: int = 1) -> Manifest:
    """Copies of these steps; the manifest of the last."""
    found = [save_flushed(url, step, epoch).manifest for step in steps][-1]
    assert found is not None
    return found


def left(url: str) -> list[str]:
    return [f"{g.step}-{g.epoch}" for g in PersistentStore(url).generations()]


def test_the_newest_stay(url: str) -> None:
    newest = flushed(url, (100, 200, 300, 400))
    store = PersistentStore(url)
    assert retain(store, newest, 0, ONCE) == []
    assert [g.step for g in retain(store, newest, 2, ONCE)] == [100, 200]
    assert left(url) == ["300-1", "400-1"]
    assert store.place.list("step-00000100-epoch-1") == []
    assert [g.step for g in retain(store, newest, 1, ONCE)] == [300]


def test_nothing_goes_before_the_newest_is_there_as_a_whole(url: str) -> None:
    newest = flushed(url, (100, 200, 300))
    store = PersistentStore(url)
    assert retain(store, replace(newest, save="another"), 1, ONCE) == []
    store.place.write(f"{newest.name}/__1_0.distcp", [b"too short"])
    assert retain(store, newest, 1, ONCE) == []
    store.place.remove(f"{newest.name}/{MANIFEST}")
    assert retain(store, newest, 1, ONCE) == []
    assert left(url) == ["100-1", "200-1", "300-1"]


def test_a_copy_that_is_not_whole_does_not_count(url: str) -> None:
    newest = flushed(url, (100, 200, 300))
    store = PersistentStore(url)
    store.place.remove("step-00000200-epoch-1/.metadata")
    assert retain(store, newest, 2, ONCE) == []
    newest = flushed(url, (400,))
    assert [g.step for g in retain(store, newest, 2, ONCE)] == [100, 200]


def test_what_others_wrote_and_what_nobody_can_read_stays(url: str) -> None:
    newest = flushed(url, (100, 200, 300))
    store = PersistentStore(url)
    other = replace(manifest_of(50, me=None), run="run-2")
    for name in (other.name, "step-00000060-epoch-1", "step-00000070-epoch-1"):
        store.place.make_dir(name)
    store.place.write(f"{other.name}/{MANIFEST}", [other.to_json().encode()])
    store.place.write(f"step-00000060-epoch-1/{MANIFEST}", [b"{"])
    store.place.write("step-00000070-epoch-1/__0_0.distcp", [b"a flush that did not end"])
    store.place.write("notes.txt", [b"mine"])
    assert [g.step for g in retain(store, newest, 1, ONCE)] == [100, 200]
    assert left(url) == ["50-1", "60-1", "70-1", "300-1"]
    assert "notes.txt" in store.place.list()


def test_dead_ends_do_not_count_and_go_when_newer_ones_are_there(url: str) -> None:
    run = RunHistory(RUN_ID, (Start(1), Start(2, (100, 1))))
    flushed(url, (100, 200, 300))
    newest = flushed(url, (150,), epoch=2)
    store = PersistentStore(url)
    assert retain(store, newest, 2, run) == [], "100-1 is the second newest of the run"
    newest = flushed(url, (250,), epoch=2)
    assert [g.name for g in retain(store, newest, 2, run)] == [
        f"step-00000{step}-epoch-1" for step in (100, 200, 300)
    ]
    assert left(url) == ["150-2", "250-2"]


def test_who_may_not_write_any_more_removes_nothing(url: str) -> None:
    def lost() -> None:
        raise CheckpointError("another job took over")

    newest = flushed(url, (100, 200))
    with pytest.raises(CheckpointError, match="took over"):
        retain(PersistentStore(url), newest, 1, ONCE, lost)
    assert left(url) == ["100-1", "200-1"]
