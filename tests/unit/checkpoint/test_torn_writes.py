"""Power failures at every moment of saving, flushing and dropping: no torn checkpoint is trusted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import generation_name
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.store import LocalStore, PersistentStore, Store
from saves import RUN_ID, save_flushed, save_local
from torn import Left, Operation, Recorded, materialize, states_after_a_crash


class History:
    """A scenario on a recorded disk, and after how many operations each promise was given."""

    def __init__(self, root: Path, files: Recorded) -> None:
        self.root, self.files = root, files
        self.promises: list[tuple[int, int | None, str]] = []
        """operations done when it was given and when it was about to be broken, what"""

    def promise(self, what: str) -> None:
        self.promises.append((len(self.files.operations), None, what))

    def end(self, what: str) -> None:
        """From now on it need not hold."""
        at = len(self.files.operations)
        self.promises = [
            (given, at if name == what and until is None else until, name)
            for given, until, name in self.promises
        ]

    def held_after(self, done: int) -> set[str]:
        return {
            what for given, until, what in self.promises
            if given <= done and (until is None or done <= until)
        }  # fmt: skip


def saving_on_a_node(root: Path, files: Recorded) -> History:
    history, store = History(root, files), LocalStore(root, RUN_ID, files)
    for step in range(1, 5):
        store.begin(9, 9)  # an attempt that never ends
        generation = save_local(root, step, redundancy=False, files=files)
        history.promise(generation.name)
        store.advance(generation, "protected")
        store.advance(generation, "flushed")
        if step > 2:
            history.end(generation_name(step - 2, 1))
        store.keep(2)
    return history


def flushing(root: Path, files: Recorded) -> History:
    history, store, run = History(root, files), PersistentStore(root, files), RunHistory(RUN_ID, ())
    for step in (1, 2):
        run = run.started(None if step == 1 else (1, 1))
        store.write_run(run)
        history.promise(f"epoch {step}")
        history.promise(save_flushed(root, step, step, files).name)
    history.end(generation_name(1, 1))
    store.drop(store.generations()[0])
    return history


def left_over(history: History) -> Iterator[Left]:
    """The states, each once."""
    seen: set[tuple[frozenset[str], str]] = set()
    for left in states_after_a_crash(history.files.operations, history.root):
        key = frozenset(history.held_after(left.done)), repr(left.tree)
        if key not in seen:
            seen.add(key)
            yield left


def told(left: Left) -> str:
    return f"after {left.done} operations, data {left.data}, {left.lost_names} names lost"


def violations(history: History, store_at: Callable[[Path], Store], again: Path) -> Iterator[str]:
    """What is wrong with any state after a crash."""
    for left in left_over(history):
        shutil.rmtree(again, ignore_errors=True)
        materialize(left.tree, again)
        store = store_at(again)
        valid = [g for g in store.generations() if g.manifest is not None]
        for generation in valid:
            for problem in store.verify(generation):
                yield f"{told(left)}: {generation.name} {problem}"
        there = {generation.name for generation in valid}
        if isinstance(store, PersistentStore):
            if not (record := promised_epoch(store, left, history)).isdecimal():
                yield record
                continue
            there |= {f"epoch {epoch}" for epoch in range(int(record) + 1)}
        if lost := history.held_after(left.done) - there:
            yield f"{told(left)}: lost {', '.join(sorted(lost))}"


def promised_epoch(store: PersistentStore, left: Left, history: History) -> str:
    try:
        run = store.read_run()
    except Exception as problem:  # noqa: BLE001
        return f"{told(left)}: {problem}"
    return str(run.epoch if run else 0)


def on_a_node(root: Path) -> Store:
    return LocalStore(root, RUN_ID)


SCENARIOS = pytest.mark.parametrize(
    ("scenario", "store_at"),
    [(saving_on_a_node, on_a_node), (flushing, PersistentStore)],
    ids=["node", "persistent"],
)  # fmt: skip


def recorded(scenario: Callable[[Path, Recorded], History], files: Recorded, root: Path) -> History:
    root.mkdir()
    return scenario(root, files)


# A record whose copy alone was written is the newer one.
@pytest.mark.filterwarnings("ignore:.*its copy is used instead")
@SCENARIOS
def test_no_torn_checkpoint_is_trusted_and_none_that_was_promised_is_lost(
    scenario: Callable[[Path, Recorded], History], store_at: Callable[[Path], Store], tmp_path: Path
) -> None:
    history = recorded(scenario, Recorded(), tmp_path / "first")
    assert len(list(left_over(history))) > 60
    assert list(violations(history, store_at, tmp_path / "again")) == []


def test_saving_goes_on_from_such_states(tmp_path: Path) -> None:
    history = recorded(saving_on_a_node, Recorded(), tmp_path / "first")
    again = tmp_path / "again"
    for left in list(left_over(history))[::7]:
        shutil.rmtree(again, ignore_errors=True)
        materialize(left.tree, again)
        for step in (4, 5):
            save_local(again, step, epoch=2)
        store = LocalStore(again, RUN_ID)
        store.keep(2)
        assert [(g.step, g.epoch) for g in store.generations() if g.epoch < 9] == [(4, 2), (5, 2)]


# ---- the replay itself finds what it is there for


class WithoutSync(Recorded):
    def sync(self, fd: int, path: Path) -> None: ...


class WithoutDirectorySync(Recorded):
    def sync_dir(self, path: Path) -> None: ...


class SyncBeforeFlush(Recorded):
    """What torch's own writer does with its metadata: fsync, while the bytes are in Python's buffer."""

    def sync(self, fd: int, path: Path) -> None:  # noqa: ARG002
        last = max(i for i, o in enumerate(self.operations) if o.kind == "write")
        self.operations.insert(last, Operation("sync", path))


class ManifestLast(Recorded):
    """Drops a generation in any order."""

    def remove(self, path: Path) -> None:
        if path.name != "manifest.json":
            super().remove(path)


@pytest.mark.filterwarnings("ignore:.*its copy is used instead")
@pytest.mark.parametrize(
    "broken", [WithoutSync, WithoutDirectorySync, SyncBeforeFlush, ManifestLast]
)
@SCENARIOS
def test_a_disk_that_is_used_wrongly_is_noticed(
    scenario: Callable[[Path, Recorded], History],
    store_at: Callable[[Path], Store],
    broken: type[Recorded],
    tmp_path: Path,
) -> None:
    history = recorded(scenario, broken(), tmp_path / "first")
    assert next(violations(history, store_at, tmp_path / "again"), None) is not None


def test_the_replay_of_everything_is_the_disk_itself(tmp_path: Path) -> None:
    history = recorded(saving_on_a_node, Recorded(), tmp_path / "first")
    *_, last = states_after_a_crash(history.files.operations, history.root)
    materialize(last.tree, tmp_path / "again")

    def files_of(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert files_of(tmp_path / "again") == files_of(tmp_path / "first")
    assert FileOps().list(tmp_path / "again" / RUN_ID) != []
