"""What goes wrong with a save is told, and the run goes on; what is damaged is repaired or passed over."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.store import LocalStore, PersistentStore, check
from fivefold.errors import AllLost, CheckpointError, CheckpointWarning, UsageError
from fivefold.mesh import Mesh
from ranks import run_ranks


@contextmanager
def told() -> Iterator[list[str]]:
    """What was warned of in the block; filters are those of all threads."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CheckpointWarning)
        yield texts
    texts += [str(one.message) for one in seen if one.category is CheckpointWarning]


def run(
    mesh: Mesh,
    folder: Path,
    steps: range,
    between: Callable[[Checkpointer, int], None] | None = None,
    **how: Any,
) -> tuple[int | None, int]:
    """Count steps, and save after each; from where it went on, and the count at the end."""
    node = f"node-{mesh.rank}"
    weight = nn.Linear(64, 64)
    count = {"steps": 0, "of rank": mesh.rank} if how.pop("apart", False) else {"steps": 0}
    given: dict[str, Any] = {"local": folder / node, "node": node, "flush_every": 0, **how}
    with Checkpointer(folder / "far", mesh, **given, weight=weight, count=count) as ckpt:
        begun = ckpt.load()
        with torch.no_grad():
            assert begun is None or torch.equal(weight.weight, torch.full((64, 64), float(begun)))
            assert begun == (count["steps"] or None)
            for step in steps:
                weight.weight.fill_(step)
                count["steps"] = step
                if between is not None:
                    between(ckpt, step)
                ckpt.save(step)
                ckpt.wait()
    assert count.get("of rank", mesh.rank) == mesh.rank
    return begun, count["steps"]


def generation(folder: Path, node: str, step: int) -> Path:
    [found] = (folder / node).glob(f"*/step-{step:08}-epoch-1")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def second_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk of one node."""
    sync = FileOps.sync

    def fails(self: FileOps, fd: int, path: Path) -> None:
        if "node-1" in str(path) and "step-00000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(self, fd, path)

    monkeypatch.setattr(FileOps, "sync", fails)


@pytest.mark.long
def test_a_disk_that_fails_costs_that_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_step_fails(monkeypatch)
    with told() as warned:
        assert run_ranks(3, run, tmp_path, range(1, 4)) == [(None, 3)] * 3
    [text] = warned
    assert re.search(
        r"^step 2 was not saved, and training goes on: writing step 2 failed on rank 1: "
        r"fsync of /.*/node-1/.*/__1_0\.distcp: Input/output error; that storage fails",
        text,
    ), text
    store = LocalStore(tmp_path / "node-0", generation(tmp_path, "node-0", 3).parent.name)
    assert [(g.step, g.manifest is not None) for g in store.generations()] == [(1, True), (3, True)]
    assert run_ranks(3, run, tmp_path, range(4, 5)) == [(3, 4)] * 3


@pytest.mark.parametrize("waits", [True, False])
def test_where_warnings_are_errors_all_ranks_raise_them(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(mesh: Mesh, done: list[int]) -> None:
        node = f"node-{mesh.rank}"
        given: dict[str, Any] = {"local": tmp_path / node, "node": node, "every": 10_000}
        with Checkpointer(tmp_path / "far", mesh, **given, flush_every=0, count={"n": 0}) as ckpt:
            for step in range(1, 3 if waits else 10_000):
                done.append(step)
                if step == 2:
                    ckpt.save(step)
                ckpt.maybe_save(step)
                time.sleep(0.01)
            ckpt.wait()

    def raised(mesh: Mesh) -> list[int]:
        done: list[int] = []
        with pytest.raises(CheckpointWarning, match="writing step 2 failed on rank 1"):
            train(mesh, done)
        return done

    second_step_fails(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        first, *others = run_ranks(3, raised)
    assert others == [first, first]  # after the same step


def test_a_disk_that_fails_later_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that says LOCAL is written, the one that says PROTECTED is not."""
    replace, seen = Path.replace, list[Path]()

    def fails(self: Path, target: Path) -> Path:
        if target.name == "manifest.json" and "node-1" in str(target) and "0002-" in str(target):
            seen.append(target)
            if len(seen) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with told() as warned:
        assert run_ranks(3, run, tmp_path, range(1, 4)) == [(None, 3)] * 3
    [text] = warned
    assert "step 2 is saved, but not noted as protected" in text and "failed on rank 1" in text
    named = r"renaming a file to /.*/node-1/.*/step-00000002-epoch-1/manifest\.json"
    assert re.search(f"{named}: Input/output error; that storage fails", text), text


def test_a_full_disk_costs_redundancy_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding happens in another process; here a directory stands where its file should."""

    def full(ckpt: Checkpointer, step: int) -> None:
        path = tmp_path / "node-1" / ckpt._opened.run.run / f"step-{step:08}-epoch-1"
        if step == 2 and ckpt._channels.training.rank == 0:
            real = LocalStore.commit

            def commit(self: LocalStore, manifest: Any) -> Any:
                if manifest.step == 2 and not path.joinpath("redundancy-1.bin").exists():
                    path.joinpath("redundancy-1.bin").mkdir(exist_ok=True)
                return real(self, manifest)

            monkeypatch.setattr(LocalStore, "commit", commit)

    with told() as warned:
        run_ranks(3, lambda mesh: run(mesh, tmp_path, range(1, 4), full))
    [text] = warned
    assert "step 2 is saved, but not protected" in text and "rank 1" in text
    states = LocalStore(
        tmp_path / "node-0", generation(tmp_path, "node-0", 3).parent.name
    ).generations()
    assert [(g.step, g.manifest.state) for g in states if g.manifest][-1] == (3, "flushed")


@pytest.mark.long
@pytest.mark.parametrize("what", ["__1_0.distcp", "redundancy-1.bin", "manifest.json", ".metadata"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, what: str) -> None:
    run_ranks(3, run, tmp_path, range(1, 3))
    for path in (tmp_path / "far").glob("step-*/*"):
        path.unlink()
    flip(generation(tmp_path, "node-1", 2) / what)
    with told() as warned:
        assert run_ranks(3, run, tmp_path, range(3, 4)) == [(2, 3)] * 3
    assert warned == []


def test_more_damage_than_the_scheme_can_mend_leads_to_an_older_save(tmp_path: Path) -> None:
    run_ranks(3, run, tmp_path, range(1, 4))
    for path in (tmp_path / "far").glob("step-*/*"):
        path.unlink()
    for rank in (0, 2):
        flip(generation(tmp_path, f"node-{rank}", 3) / f"__{rank}_0.distcp")
    with told() as warned:
        assert run_ranks(3, run, tmp_path, range(3, 4)) == [(2, 3)] * 3
    assert "a newer save is passed over: step-00000003-epoch-1" in warned[0]
    for rank in (0, 2):
        for path in (tmp_path / f"node-{rank}").glob("*/step-*/__*"):
            flip(path)
    for path in (tmp_path / "far").glob("step-*/__*"):
        flip(path)
    with told(), pytest.raises(AllLost, match="has made saves") as caught:
        run_ranks(3, run, tmp_path, range(4, 5))
    said = str(caught.value)
    assert "the last: step 3 of start 2, on node-0, node-1, node-2 with scheme xor" in said
    assert f"Looked at: {tmp_path / 'far'}; " in said and "begin_again=True" in said
    assert all(f"step-{step:08}-epoch-" in said for step in (2, 3)), "why each cannot be loaded"
    assert caught.value.exit_code == 2


def test_a_run_that_never_completed_a_save_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalStore, "commit", fails)
    with told(), pytest.raises(CheckpointError, match=r"ends without any save: .*No space left"):
        run_ranks(2, run, tmp_path, range(1, 3))
    monkeypatch.undo()
    with told() as warned:
        assert run_ranks(2, run, tmp_path, range(1, 3)) == [(None, 2)] * 2
    [text] = warned
    assert "started 1 time(s), and it completed no save: it begins again at step 0" in text
    assert run_ranks(2, run, tmp_path, range(3, 4)) == [(2, 3)] * 2


@pytest.mark.long
@pytest.mark.parametrize("starts", [1, 2])
def test_a_run_that_lost_all_its_saves_stops_until_it_is_told_to_begin_again(
    tmp_path: Path, starts: int
) -> None:
    """Also where the second start made no save: it had loaded one."""
    run_ranks(2, run, tmp_path, range(1, 3))
    for _ in range(starts - 1):
        run_ranks(2, lambda mesh: record_only(mesh, tmp_path))
    for path in [*tmp_path.glob("node-*"), *(tmp_path / "far").glob("step-*")]:
        shutil.rmtree(path)
    for _ in range(2):  # asking twice is no answer
        with pytest.raises(AllLost, match="has made saves") as caught:
            run_ranks(2, run, tmp_path, range(1, 3))
    assert "step 2 of start 1" in str(caught.value)
    assert "/node-0/" in str(caught.value)
    with told() as warned:
        again = run_ranks(2, lambda mesh: run(mesh, tmp_path, range(1, 2), begin_again=True))
    assert again == [(None, 1)] * 2
    [text] = warned
    assert "none of its saves can be loaded (the last: step 2 of start 1" in text
    assert "it begins again at step 0" in text
    # It goes on from what it has now, whether it may begin again or not.
    assert (
        run_ranks(2, lambda mesh: run(mesh, tmp_path, range(2, 3), begin_again=True))
        == [(1, 2)] * 2
    )


def test_a_run_that_began_again_and_made_no_save_has_nothing_to_lose(tmp_path: Path) -> None:
    run_ranks(2, run, tmp_path, range(1, 3))
    away = tmp_path / "away"
    away.mkdir()
    for path in [*tmp_path.glob("node-*"), *(tmp_path / "far").glob("step-*")]:
        path.rename(away / path.name)
    with told():
        run_ranks(2, lambda mesh: record_only(mesh, tmp_path, begin_again=True))
    for path in away.glob("node-*"):  # the nodes come back, too late
        shutil.rmtree(tmp_path / path.name)
        path.rename(tmp_path / path.name)
    with told() as warned:
        assert run_ranks(2, run, tmp_path, range(1, 2)) == [(None, 1)] * 2
    assert "a later start of the run went on from before it" in warned[0]
    assert "it completed no save: it begins again" in warned[-1]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["single", "partner"])
def test_a_save_that_could_not_be_copied_is_copied_by_the_next_start(
    tmp_path: Path, scheme: str
) -> None:
    far = tmp_path / "far"
    taken = far / "step-00000002-epoch-1"

    def run(mesh: Mesh, last: int) -> int | None:
        node = "ab"[mesh.rank]
        given: dict[str, Any] = {"local": tmp_path / node, "node": node, "scheme": scheme}
        with Checkpointer(far, mesh, **given, weight=torch.ones(5) * mesh.rank) as ckpt:
            begun = ckpt.load()
            for step in range((begun or 0) + 1, last + 1):
                ckpt.save(step)
            ckpt._prepare()
        return begun

    far.mkdir()
    taken.write_text("in the way")
    with told() as warned:
        assert run_ranks(2, run, 2) == [None, None]
    assert any("was not flushed" in text and "fivefold checkpoint flush" in text for text in warned)
    taken.unlink()
    assert run_ranks(2, run, 2) == [2, 2]  # finished: it saves nothing
    kept = [g for g in PersistentStore(str(far)).generations() if g.manifest is not None]
    assert [(g.step, g.epoch) for g in kept] == [(2, 1)]
    assert not check(kept[0].place, kept[0].name, kept[0].manifest.items(), deep=True)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert run_ranks(2, run, 2) == [2, 2]


def record_only(mesh: Mesh, folder: Path, **how: Any) -> None:
    """A start that goes on, is recorded, and dies in its first save."""
    node, weight = f"node-{mesh.rank}", nn.Linear(64, 64)
    how = {"local": folder / node, "node": node, "weight": weight, "count": {"steps": 0}, **how}
    with Checkpointer(folder / "far", mesh, **how) as ckpt:
        ckpt.load()
        writing = ckpt._prepare()
        if mesh.rank == 0:
            writing.first()


def test_a_directory_that_takes_no_note_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("fivefold.checkpoint.writing.write_note", fails)
    with told() as warned:
        run_ranks(2, run, tmp_path, range(1, 2))
    [text] = warned
    assert (
        f"step 1 is saved, but {tmp_path / 'far'} does not know of it: Disk quota exceeded" in text
    )
    shutil.rmtree(tmp_path / "far" / "step-00000001-epoch-1")
    for rank in range(2):
        flip(generation(tmp_path, f"node-{rank}", 1) / ".metadata")
    with told(), pytest.raises(AllLost, match="the last: step-00000001-epoch-1"):
        run_ranks(2, run, tmp_path, range(1, 2))  # the manifests on the nodes know


def test_without_its_agent_a_node_saves_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "encoding")
    with told() as warned:
        assert run_ranks(3, lambda mesh: run(mesh, tmp_path, range(1, 3))) == [(None, 2)] * 3
    for step in (1, 2):
        told_of = [text for text in warned if f"step {step} is saved, but not protected" in text]
        assert told_of and "agent" in told_of[0]
    monkeypatch.delenv("FIVEFOLD_CRASH_AT")
    assert run_ranks(3, run, tmp_path, range(3, 4)) == [(2, 3)] * 3


def test_an_agent_that_has_ended_is_started_again(tmp_path: Path) -> None:
    pids: list[int] = []

    def kill(ckpt: Checkpointer, step: int) -> None:
        if ckpt._channels.training.rank == 1 and step > 1:  # the first save starts it
            pids.append(ckpt._node.agent.pid)
            if step == 2:
                os.kill(pids[-1], signal.SIGKILL)

    assert run_ranks(3, lambda mesh: run(mesh, tmp_path, range(1, 4), kill)) == [(None, 3)] * 3
    assert len(set(pids)) == 2
    shutil.rmtree(tmp_path / "node-0")
    shutil.rmtree(tmp_path / "far" / "step-00000003-epoch-1")
    with told() as warned:
        assert run_ranks(3, run, tmp_path, range(4, 5)) == [(3, 4)] * 3
    assert warned == []


def test_what_differs_from_rank_to_rank_needs_as_many_ranks(tmp_path: Path) -> None:
    run_ranks(2, lambda mesh: run(mesh, tmp_path, range(1, 3), apart=True))
    assert run_ranks(2, lambda mesh: run(mesh, tmp_path, range(3, 4), apart=True)) == [(2, 3)] * 2
    with pytest.raises(UsageError, match="count differed from rank to rank, so 2 ranks are needed"):
        run_ranks(1, lambda mesh: run(mesh, tmp_path, range(4, 5), apart=True))


def test_different_steps_are_refused(tmp_path: Path) -> None:
    def check(mesh: Mesh) -> None:
        how: dict[str, Any] = {"local": tmp_path / "local", "w": torch.ones(1)}
        with Checkpointer(tmp_path / "far", mesh, **how) as ckpt:
            ckpt.save(mesh.rank)
            ckpt.wait()

    with (
        told() as warned,
        pytest.raises(CheckpointError, match="ends without any save: ranks save different"),
    ):
        run_ranks(2, check)
    assert "ranks save different steps (rank 0: 0, rank 1: 1)" in warned[0]


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        run_ranks(2, run, tmp_path, range(1, 2))
    (tmp_path / "far").unlink()
    (tmp_path / "node-1").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*node-1.*name a directory"):
        run_ranks(2, run, tmp_path, range(1, 2))


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_an_older_save_is_never_taken_without_a_word(how: str, tmp_path: Path) -> None:
    """The manifest of the newest save has no other copy; the record of the run knows of the save."""
    run_ranks(1, run, tmp_path, range(1, 4))
    for folder in (generation(tmp_path, "node-0", 3), tmp_path / "far" / "step-00000003-epoch-1"):
        if how == "damaged":
            flip(folder / "manifest.json")
        else:
            (folder / "manifest.json").unlink()
    with told() as warned:
        assert run_ranks(1, run, tmp_path, range(0)) == [(2, 2)]
    [text] = warned
    assert text.startswith("a newer save is passed over: step-00000003-epoch-1: ")
    why = {"damaged": "its digest does not match", "gone": "the run has noted it in"}[how]
    assert why in text, text


def first_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = FileOps.sync

    def fails(self: FileOps, fd: int, path: Path) -> None:
        if "step-00000001" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(self, fd, path)

    monkeypatch.setattr(FileOps, "sync", fails)


def counting(mesh: Mesh, folder: Path, count: dict[str, int]) -> Checkpointer:
    return Checkpointer(folder / "far", mesh, local=folder / "node", count=count, signals=False)


@pytest.mark.filterwarnings("ignore::fivefold.errors.CheckpointWarning")
def test_who_looked_before_another_job_ended_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found no save, as there was none yet; at its own first save the other job is gone."""
    first_step_fails(monkeypatch)

    def early(mesh: Mesh) -> None:
        count = {"steps": 0}
        with counting(mesh, tmp_path, {"steps": 2}) as other:
            other.save(1)
            other.wait()
            with counting(mesh, tmp_path, count) as ckpt:
                assert ckpt.load() is None
                other.save(2)
                other.close()
                with pytest.raises(CheckpointError, match="written to by another job since"):
                    ckpt.save(1)
        with counting(mesh, tmp_path, count) as ckpt:
            assert ckpt.load() == 2 and count == {"steps": 2}

    run_ranks(1, early)


@pytest.mark.filterwarnings("ignore::fivefold.errors.CheckpointWarning")
def test_resuming_waits_for_a_job_that_ends_and_goes_on_from_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_step_fails(monkeypatch)

    def early(mesh: Mesh) -> None:
        count = {"steps": 0}
        with counting(mesh, tmp_path, {"steps": 2}) as other:
            other.save(1)
            other.wait()
            with counting(mesh, tmp_path, count) as ckpt:
                other.save(2)
                ending = threading.Timer(1.0, other.close)
                ending.start()
                assert [step for step, _ in ckpt.resume([0, 0])] == [3, 4]
                ending.join()
                assert count == {"steps": 2}

    run_ranks(1, early)


def test_a_directory_within_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory: a part of this path is a file"):
        run_ranks(2, run, tmp_path / "file", range(1, 2))
