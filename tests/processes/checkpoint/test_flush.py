"""Copying to the persistent level: paths and object stores, interrupted, refused, too fast."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fivefold.checkpoint.files import FileOps, is_temporary
from fivefold.checkpoint.flush import copy_files, finish, items_of
from fivefold.checkpoint.manifest import MANIFEST, METADATA
from fivefold.checkpoint.place import Place, place_at
from fivefold.checkpoint.rate import Rate
from fivefold.checkpoint.store import PersistentStore
from fivefold.errors import CheckpointError, Damaged, UsageError
from generations import saved_state
from waiting import awaited

MIB = 1 << 20
STATE = saved_state([[2 * MIB + 3, 0], [77]], scheme="partner")
NAME = STATE.manifest.name
ITEMS = items_of(STATE.manifest, [0, 1], metadata=True)


class Failing(FileOps):
    """A disk that fails at a certain file, in the operation that is told."""

    def __init__(self, file: str, operation: str, number: int) -> None:
        self._file, self._operation, self._number = file, operation, number

    def sync(self, fd: int, path: Path) -> None:
        if self._operation == "sync" and path.name.startswith(self._file):
            raise OSError(self._number, os.strerror(self._number))
        super().sync(fd, path)

    def raw(self, path: Path) -> Any:
        if self._operation == "create" and path.name.startswith(self._file):
            raise OSError(self._number, os.strerror(self._number), str(path))
        return super().raw(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for member in (0, 1):
        STATE.put(tmp_path / "local", member)
    return tmp_path / "local" / NAME


@pytest.fixture(params=["path", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory://":
        # pytest's own paths are not known to it: a folder of its own for each test
        return f"memory://{tmp_path}/shared"
    return f"{request.param if request.param != 'path' else ''}{tmp_path}/shared"


def copy(source: Path, place: Place, **options: Any) -> tuple[str, ...]:
    return copy_files(source, place, STATE.manifest, ITEMS, **options).names


def test_a_copy_is_a_checkpoint_once_it_is_finished(source: Path, url: str) -> None:
    store = PersistentStore(url)
    assert copy(source, store.place) == tuple(item.name for item in ITEMS)
    [unfinished] = store.generations()
    assert unfinished.manifest is None
    finish(store, replace(STATE.manifest, me=1, state="protected"))
    [generation] = store.generations()
    assert generation.manifest == replace(STATE.manifest, state="flushed")
    assert store.verify(generation) == []
    assert set(store.place.list(NAME)) == {*STATE.payload, MANIFEST}


def test_what_is_there_is_not_copied_again(source: Path, url: str) -> None:
    place = place_at(url)
    first = copy_files(source, place, STATE.manifest, ITEMS[:2])
    assert first.copied_bytes == 2 * MIB + 3
    assert copy(source, place) == ("__2_0.distcp", METADATA)
    assert copy(source, place) == ()


def test_a_file_of_another_save_is_replaced_even_if_it_is_as_long(source: Path, url: str) -> None:
    place = place_at(url)
    copy(source, place)
    place.write(f"{NAME}/__2_0.distcp", [bytes(77)])
    assert copy(source, place) == ("__2_0.distcp",)
    assert place.read(f"{NAME}/__2_0.distcp") == STATE.payload["__2_0.distcp"]


def test_a_source_that_has_changed_is_not_passed_on(source: Path, url: str) -> None:
    place = place_at(url)
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[MIB] ^= 1
    (source / "__0_0.distcp").write_bytes(data)
    with pytest.raises(Damaged, match=r"__0_0\.distcp is damaged: it is not what was saved"):
        copy(source, place)
    assert place.list(NAME) == []


def test_a_source_that_is_gone_is_told(source: Path, url: str) -> None:
    (source / METADATA).unlink()
    with pytest.raises(
        CheckpointError, match=r"was not written: reading .*\.metadata: No such file"
    ):
        copy(source, place_at(url))


def test_unfinished_copies_are_not_finished(source: Path, url: str) -> None:
    store = PersistentStore(url)
    copy_files(source, store.place, STATE.manifest, ITEMS[:2])
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp: it is not there"):
        finish(store, STATE.manifest)
    [generation] = store.generations()
    assert generation.manifest is None


@pytest.mark.parametrize(
    ("operation", "number", "words"),
    [("sync", errno.EIO, "Input/output error"), ("create", errno.ENOSPC, "No space left")],
)
def test_a_disk_that_fails_leaves_nothing_half_written(
    source: Path, tmp_path: Path, operation: str, number: int, words: str
) -> None:
    failing = Failing("__2_0.distcp", operation, number)
    shared = tmp_path / "shared"
    with pytest.raises(
        CheckpointError, match=rf"__2_0\.distcp was not written: .*{words}.*; .*stays on"
    ):
        copy(source, place_at(shared, failing), files=failing)
    assert sorted(p.name for p in (shared / NAME).iterdir()) == ["__0_0.distcp", "__1_0.distcp"]
    assert copy(source, place_at(shared)) == ("__2_0.distcp", METADATA)


def test_a_manifest_that_cannot_be_written_is_told(source: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    copy(source, place_at(shared))
    with pytest.raises(CheckpointError, match="Input/output error"):
        finish(PersistentStore(shared, Failing(MANIFEST, "sync", errno.EIO)), STATE.manifest)
    assert PersistentStore(shared).generations()[0].manifest is None


def test_a_directory_that_cannot_be_made_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(CheckpointError, match="was not written"):
        copy(source, place_at(tmp_path / "shared"))


def test_a_copy_that_another_one_overtakes_takes_nothing_away(source: Path, tmp_path: Path) -> None:
    store = PersistentStore(str(tmp_path / "shared"))
    begun = tmp_path / "shared" / NAME
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(copy, source, store.place, rate=Rate(3 << 20))
        awaited(
            lambda: begun.is_dir() and any(is_temporary(path.name) for path in begun.iterdir()),
            "the slow copy to begin",
            10.0,
        )
        copy(source, store.place)
        finish(store, STATE.manifest)
        with pytest.raises(CheckpointError, match="was not written"):
            slow.result(30)
    (generation,) = store.generations()
    assert not [*store.verify(generation)]


def test_an_object_store_that_breaks_off_keeps_no_torn_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = fsspec.filesystem("memory")
    opened = MemoryFileSystem._open

    def breaks(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        file = opened(self, path, *args, **kwargs)
        if path.endswith("__0_0.distcp"):
            write = file.write

            def torn(data: bytes) -> int:
                if file.tell() >= MIB:
                    raise ConnectionResetError("gone")
                return int(write(data))

            file.write = torn
        return file

    url = f"memory://{tmp_path}/broken"
    monkeypatch.setattr(MemoryFileSystem, "_open", breaks)
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp was not written: writing .*__0_0\.distcp: gone"
    ):
        copy(source, place_at(url))
    monkeypatch.undo()
    assert system.find(f"{tmp_path}/broken") == []
    assert copy(source, place_at(url))[0] == "__0_0.distcp"


def test_what_a_killed_agent_began_is_removed(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared" / NAME
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp.0a1b2c3d.tmp").write_bytes(b"torn")
    (folder / "__9_0.distcp.0a1b2c3d.tmp").write_bytes(b"another node is writing this")
    copy(source, place_at(tmp_path / "shared"))
    assert [p.name for p in folder.glob("*.tmp")] == ["__9_0.distcp.0a1b2c3d.tmp"]


# --- the limit ------------------------------------------------------------------------------------


def test_no_more_than_the_rate_goes_through() -> None:
    rate = Rate(10 * MIB)
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rate.take, [MIB] * 6))
    # The first is free, and there is a short burst: at least 4 of 6 have to wait 0.1 s each.
    assert time.monotonic() - begun > 0.4


def test_stopping_wakes_who_waits_for_the_rate() -> None:
    stop = threading.Event()
    rate = Rate(1.0, stop)
    rate.take(10**6)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(CheckpointError, match="stopped"):
        rate.take(1)
    with pytest.raises(CheckpointError, match="stopped"):
        Rate(None, stop).take(1)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_that_moves_nothing_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="moves nothing"):
        Rate(rate)
