"""`Checkpointer` with ranks that are threads; nodes are directories here, and agents are real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fivefold.checkpoint import staging
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.note import newest_note
from fivefold.checkpoint.place import place_at
from fivefold.checkpoint.rhythm import Rhythm
from fivefold.checkpoint.store import LocalStore, PersistentStore
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from ranks import run_ranks


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 10))
    generator = torch.Generator().manual_seed(1)  # threads share the global one
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(step))


class Training:
    """A model that learns the same on every rank."""

    def __init__(self) -> None:
        self.model = net()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 2)
        self.notes: dict[str, Any] = {}

    def step(self, number: int) -> None:
        self.model(batch(number)).square().mean().backward()
        self.optim.step()
        self.schedule.step()
        self.optim.zero_grad()
        self.notes["last"] = number

    def objects(self) -> dict[str, Any]:
        return vars(self)

    def outcome(self) -> list[Any]:
        moments = [v for one in self.optim.state.values() for _, v in sorted(one.items())]
        weights = list(self.model.state_dict().values())
        return [
            *map(torch.Tensor.tolist, [*weights, *moments]),
            self.schedule.last_epoch,
            self.notes,
        ]


def uninterrupted(steps: int) -> list[Any]:
    training = Training()
    for step in range(1, steps + 1):
        training.step(step)
    return training.outcome()


def train(
    mesh: Mesh, folder: Path, steps: int, nodes: str = "", resumes: int | None = None, **how: Any
) -> Any:
    """Go on until `steps` steps are made; ranks with one letter of `nodes` share a node."""
    node = nodes[mesh.rank] if nodes else "a"
    training = Training()
    given = {"local": folder / node, "every": 2, "node": node, **how}
    with Checkpointer(folder / "far", mesh, **given, **training.objects()) as ckpt:
        assert ckpt.load() == resumes
        for step in range((resumes or 0) + 1, steps + 1):
            training.step(step)
            ckpt.maybe_save(step)
        ckpt.wait()
        assert ckpt.last is None or not ckpt.last.problem, ckpt.last
    return training.outcome()


def lose(folder: Path, *nodes: str) -> None:
    for node in nodes:
        shutil.rmtree(folder / node, ignore_errors=node.startswith("far"))


def names(folder: Path, node: str) -> list[str]:
    [run] = (folder / node).iterdir()
    return [g.name for g in LocalStore(folder / node, run.name).generations() if g.manifest]


@pytest.mark.long
@pytest.mark.parametrize(("saves", "loads"), [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, saves: int, loads: int) -> None:
    run_ranks(saves, train, tmp_path, 5)
    assert run_ranks(loads, lambda mesh: train(mesh, tmp_path, 9, resumes=4))[0] == uninterrupted(9)


def test_the_last_save_is_in_the_persistent_directory(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 7)
    lose(tmp_path, "a")
    assert run_ranks(2, lambda mesh: train(mesh, tmp_path, 9, resumes=6))[0] == uninterrupted(9)
    store = PersistentStore(tmp_path / "far")
    assert [g.name for g in store.generations()] == [
        "step-00000006-epoch-1",
        "step-00000008-epoch-2",
    ]
    assert all(store.verify(g) == [] for g in store.generations())


def test_old_saves_are_dropped(tmp_path: Path) -> None:
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 12, nodes="ab", keep=3))
    for node in "ab":
        assert names(tmp_path, node) == [f"step-{n:08}-epoch-1" for n in (8, 10, 12)]


@pytest.mark.parametrize(("scheme", "times"), [("single", 3), ("partner", 6)])
def test_the_room_that_saves_take_is_what_the_documentation_says(
    scheme: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times the state of a node's ranks; the largest of what lies there whenever a file is complete."""
    state_bytes, most = 1 << 20, 0
    sync = FileOps.sync

    def synced(self: FileOps, fd: int, path: Path) -> None:
        nonlocal most
        sync(self, fd, path)
        here = tmp_path / "node-0"
        sizes = (found.stat().st_size for found in here.rglob("*") if found.is_file())
        with contextlib.suppress(FileNotFoundError):  # what was just renamed, or dropped
            most = max(most, sum(sizes))

    def check(mesh: Mesh) -> None:
        name = f"node-{mesh.rank}"
        how: dict[str, Any] = {
            "local": tmp_path / name,
            "node": name,
            "scheme": scheme,
            "flush_every": 0,
        }
        parts = {"ours": torch.zeros(state_bytes // 4) + mesh.rank}
        with Checkpointer(tmp_path / "far", mesh, **how, parts=parts) as ckpt:
            for step in range(1, 7):
                parts["ours"] += 1
                ckpt.save(step)
                ckpt.wait()

    monkeypatch.setattr(FileOps, "sync", synced)
    run_ranks(2, check)
    assert times - 0.5 < most / state_bytes < times + 0.2


@pytest.mark.long
def test_old_copies_are_removed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"flush_every": 1, "keep_flushed": 2}
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 12, nodes="ab", **how))
    far = PersistentStore(tmp_path / "far")
    assert [g.step for g in far.generations()] == [10, 12]
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 14, nodes="ab", resumes=12, **how))
    assert [(g.step, g.epoch) for g in far.generations()] == [(12, 1), (14, 2)]
    how["keep_flushed"] = 0
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 18, nodes="ab", resumes=14, **how))
    assert [g.step for g in far.generations()] == [12, 14, 16, 18]
    assert all(far.verify(g) == [] for g in far.generations())


def test_what_saves_and_copies_cost_is_measured_and_noted(tmp_path: Path) -> None:
    def check(mesh: Mesh) -> float:
        node, weight = "ab"[mesh.rank], torch.ones(2 << 20)
        given: dict[str, Any] = {"local": tmp_path / node, "node": node, "flush_every": 1}
        with Checkpointer(tmp_path / "far", mesh, **given, every=1, weight=weight) as ckpt:
            ckpt._rhythm._agents_share = True
            for step in range(1, 4):
                ckpt.maybe_save(step)
                ckpt.wait()
            assert ckpt.last is not None
            return ckpt.last.agent_cpu_s

    used = run_ranks(2, check)
    assert all(0 < one < 10 for one in used), used
    note = newest_note(place_at(tmp_path / "far"))
    assert note is not None and (note.step, note.hosts) == (3, ("a", "b"))
    assert 0 < note.costs.save_s < 10 and 0 < note.costs.flush_s < 10
    assert note.costs.every_s == 0, "steps decide"


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "lost", "scheme"),
    [("ab", "a", "partner"), ("ab", "b", "partner"), ("abc", "b", "xor"), ("aabbcc", "a", "xor"),
     ("abcd", "b", "rs"), ("abcde", "ae", "rs")],
)  # fmt: skip
def test_lost_nodes_are_rebuilt(tmp_path: Path, nodes: str, lost: str, scheme: str) -> None:
    size = len(nodes)
    run_ranks(size, lambda mesh: train(mesh, tmp_path, 5, nodes=nodes, scheme=scheme))
    lose(tmp_path, *lost, "far/step-00000004-epoch-1")
    again = lambda mesh: train(mesh, tmp_path, 9, nodes=nodes, scheme=scheme, resumes=4)  # noqa: E731
    assert run_ranks(size, again)[0] == uninterrupted(9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "losses", "scheme"),
    [("abc", "abc", "partner"), ("abc", "abc", "xor"), ("abcd", ["ab", "cd", "bc"], "rs")],
)
def test_other_nodes_are_lost_before_the_next_save(
    tmp_path: Path, nodes: str, losses: Sequence[str], scheme: str
) -> None:
    """What was rebuilt is protected again at once."""
    steps, resumes = 5, None
    for lost in losses:
        run_ranks(
            len(nodes),
            lambda mesh, *how: train(mesh, tmp_path, how[0], nodes, how[1], scheme=scheme),
            steps,
            resumes,
        )
        steps, resumes = 4, 4
        lose(tmp_path, *lost, "far/step-00000004-epoch-1")
    again = lambda mesh: train(mesh, tmp_path, 9, nodes, 4, scheme=scheme)  # noqa: E731
    assert run_ranks(len(nodes), again)[0] == uninterrupted(9)


def test_fewer_nodes_go_on(tmp_path: Path) -> None:
    run_ranks(3, lambda mesh: train(mesh, tmp_path, 5, nodes="abc"))
    lose(tmp_path, "c", "far/step-00000004-epoch-1")
    again = lambda mesh: train(mesh, tmp_path, 9, nodes="ab", resumes=4)  # noqa: E731
    assert run_ranks(2, again)[0] == uninterrupted(9)


def test_fewer_nodes_than_the_scheme_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scheme xor needs"):
        run_ranks(2, lambda mesh: train(mesh, tmp_path, 5, nodes="aa", scheme="xor"))


def test_nodes_that_share_their_disk_are_refused(tmp_path: Path) -> None:
    def check(mesh: Mesh) -> None:
        Checkpointer(
            tmp_path / "far", mesh, local=tmp_path / "x", node=str(mesh.rank), w=torch.ones(1)
        )

    with pytest.raises(UsageError, match="storage that other nodes see"):
        run_ranks(2, check)


def test_a_run_in_the_directory_is_not_written_over(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path, 5)

    def forgot_to_load(mesh: Mesh) -> None:
        with Checkpointer(
            tmp_path / "far", mesh, local=tmp_path / "a", **Training().objects()
        ) as ckpt:
            ckpt.save(1)

    with pytest.raises(UsageError, match=r"go on from them with load\(\)"):
        run_ranks(1, forgot_to_load)


def test_another_model_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 5)

    def other(mesh: Mesh) -> None:
        with Checkpointer(
            tmp_path / "far", mesh, local=tmp_path / "a", model=nn.Linear(2, 2)
        ) as ckpt:
            ckpt.load()

    with pytest.raises(
        UsageError, match=r"lacks model\.bias, model\.weight; it has model\.0\.bias"
    ):
        run_ranks(2, other)
    assert run_ranks(2, lambda mesh: train(mesh, tmp_path, 9, resumes=4))[0] == uninterrupted(9)


def test_ranks_agree_when_it_is_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rhythm, "interval_s", property(lambda _: 0.05))

    def check(mesh: Mesh) -> list[int]:
        training, node = Training(), str(mesh.rank)
        how: dict[str, Any] = {"local": tmp_path / node, "node": node}
        saved: list[int] = []
        with Checkpointer(tmp_path / "far", mesh, **how, **training.objects()) as ckpt:
            for step in range(1, 200):
                training.step(step)
                if ckpt.maybe_save(step):
                    saved.append(step)
                if len(saved) == 2:
                    break
        return saved

    first, *others = run_ranks(3, check)
    assert len(first) == 2
    assert others == [first] * 2


def test_some_of_the_ranks_save_on_their_own(tmp_path: Path) -> None:
    """Without a mesh: a group of the script's own."""

    def check(mesh: Mesh, resumes: int | None) -> list[Any]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])]
        which = int(mesh.rank > 1)
        group, folder = groups[which], tmp_path / f"job-{which}"
        training, node = Training(), f"node-{mesh.rank}"
        how: dict[str, Any] = {"process_group": group, "local": folder / node, "node": node}
        with Checkpointer(folder / "far", **how, every=1, **training.objects()) as ckpt:
            assert ckpt.load() == resumes
            for step in range((resumes or 0) + 1, (resumes or 0) + 4):
                training.step(step)
                ckpt.maybe_save(step)
        return training.outcome()

    run_ranks(5, lambda mesh: check(mesh, None))
    assert run_ranks(5, lambda mesh: check(mesh, 3)) == [uninterrupted(6)] * 5


def test_parameters_that_ranks_divide_go_on_in_a_plain_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)  # all are copied beside the next step

    def check(mesh: Mesh, steps: range) -> list[list[float]]:
        model = net()
        fully_shard(model, mesh=mesh.device_mesh["data"]).set_force_sum_reduction_for_comms(True)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        how: dict[str, Any] = {"local": tmp_path / str(mesh.rank), "node": str(mesh.rank)}
        with Checkpointer(tmp_path / "far", **how, every=2, model=model, optim=optim) as ckpt:
            assert (ckpt.load() or 0) == steps.start - 1
            for step in steps:
                model(batch(step)).square().mean().backward()
                optim.step()
                optim.zero_grad()
                ckpt.maybe_save(step)
        return [value.full_tensor().tolist() for value in model.state_dict().values()]

    run_ranks(3, lambda mesh: check(mesh, range(1, 5)))
    again = run_ranks(2, lambda mesh: check(mesh, range(5, 7)))[0]
    training = Training()
    for step in range(1, 7):
        training.model(batch(step)).square().mean().backward()
        training.optim.step()
        training.optim.zero_grad()
    for got, expected in zip(again, training.model.state_dict().values(), strict=True):
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-5)


def test_without_local_saves_go_where_only_this_user_can_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = tmp_path / f"fivefold-{os.getuid()}"
    private.mkdir(mode=0o755)  # as an older version left it
    private.chmod(0o755)
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 5, local=None, flush_every=1))
    saved = [path for path in private.rglob("*") if path.is_file()]
    flushed = [path for path in (tmp_path / "far").rglob("*") if path.is_file()]
    assert len(saved) > 4 and len(flushed) > 4
    assert {path.stat().st_mode & 0o777 for path in (*saved, *flushed)} == {0o600}
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("which", ["default", "run"])
def test_saves_behind_a_link_that_somebody_made_are_not_loaded(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_ranks(2, lambda mesh: train(mesh, tmp_path, 5, local=None, flush_every=0))
    folder = tmp_path / f"fivefold-{os.getuid()}"
    if which == "run":
        [folder] = (folder / "checkpoints").iterdir()
    folder.rename(tmp_path / "planted")
    folder.symlink_to(tmp_path / "planted")
    with pytest.raises(UsageError, match=f"{folder}, where saves .* is a link"):
        run_ranks(2, lambda mesh: train(mesh, tmp_path, 9, local=None, flush_every=0))
