"""What the end of a run waits for: first what makes the last save safe, then copies that move."""

from __future__ import annotations

import signal
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.signals import STOPPED
from fivefold.checkpoint.store import LocalStore, PersistentStore
from fivefold.errors import CheckpointWarning
from fivefold.mesh import Mesh
from ranks import run_ranks


def checkpointer(mesh: Mesh, folder: Path, **how: Any) -> Checkpointer:
    node = f"node-{mesh.rank}"
    weight = torch.ones(1 << 20)  # 4 MiB
    given: dict[str, Any] = {"local": folder / node, "node": node, "every": 1, **how}
    return Checkpointer(folder / "far", mesh, **given, weight=weight)


def states(folder: Path, rank: int) -> dict[int, str]:
    [run] = (folder / f"node-{rank}").iterdir()
    found = LocalStore(folder / f"node-{rank}", run.name).generations()
    return {g.step: g.manifest.state for g in found if g.manifest is not None}


def test_copies_under_way_are_completed_without_their_limit(tmp_path: Path) -> None:
    """At 4 kB/s they would take a quarter of an hour."""

    def check(mesh: Mesh) -> bool:
        with checkpointer(mesh, tmp_path, flush_every=1, flush_bytes_per_s=4e3) as ckpt:
            ckpt.maybe_save(1)
            ckpt._finish_save()
            assert ckpt._writing is not None
            return bool(ckpt._writing._flusher.busy)

    assert run_ranks(2, check) == [True] * 2
    far = PersistentStore(tmp_path / "far")
    [copy] = far.generations()
    assert copy.step == 1 and far.verify(copy) == []
    assert [states(tmp_path, rank) for rank in range(2)] == [{1: "flushed"}] * 2


@pytest.mark.long
def test_a_copy_that_stands_still_is_given_up_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fivefold.checkpoint.writing._QUIET_S", 0.0)
    real = RankNode.flush

    def hangs(self: RankNode, *given: Any) -> Future[Copied] | None:
        return Future() if self.members.me == 1 else real(self, *given)

    def check(mesh: Mesh) -> None:
        with checkpointer(mesh, tmp_path, flush_every=1) as ckpt:
            ckpt.maybe_save(1)
            assert ckpt._writing is not None
            ckpt._writing._flusher._patience_s = 0.5

    monkeypatch.setattr(RankNode, "flush", hangs)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CheckpointWarning)
        run_ranks(2, check)
    [text] = [str(one.message) for one in seen if one.category is CheckpointWarning]
    assert "step 1 was not flushed to" in text and "given up on rank 1" in text
    assert "nothing was copied for 0.5 s" in text and "fivefold checkpoint flush" in text
    assert "training has ended, and" in capfd.readouterr().err
    assert [states(tmp_path, rank) for rank in range(2)] == [{1: "protected"}] * 2
    monkeypatch.undo()

    def again(mesh: Mesh) -> int | None:
        with checkpointer(mesh, tmp_path) as ckpt:
            return ckpt.load()

    assert run_ranks(2, again) == [1, 1]


def test_a_signal_makes_the_save_safe_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RankNode.flush
    found: list[tuple[str, str]] = []

    def looks(self: RankNode, name: str, *given: Any) -> Future[Copied] | None:
        generation = self.store.find(name)
        assert generation is not None and generation.manifest is not None
        found.append((name, generation.manifest.state))
        return real(self, name, *given)

    def train(mesh: Mesh) -> None:
        with checkpointer(mesh, tmp_path, every=1000, flush_every=0) as ckpt:
            assert ckpt._signals is not None
            for step in range(1, 500):
                if (mesh.rank, step) == (1, 3):
                    ckpt._signals.received = signal.SIGTERM
                ckpt.maybe_save(step)

    def check(mesh: Mesh) -> int:
        with pytest.raises(SystemExit) as ended:
            train(mesh)
        return int(str(ended.value.code))

    monkeypatch.setattr(RankNode, "flush", looks)
    assert run_ranks(2, check) == [STOPPED] * 2
    assert len(found) == 2 and {state for _, state in found} == {"protected"}
    assert [*states(tmp_path, 0).values()] == ["flushed"]
