"""The state of a run through DCP's files and back, on other numbers of ranks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.fsdp import fully_shard

from fivefold.checkpoint import dcp
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state import State, saved_in
from fivefold.errors import CheckpointError, UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.groups import cpu_groups
from ranks import run_ranks


class Files:
    """The bytes of a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str, start: int, length: int) -> bytes:
        return (self.path / name).read_bytes()[start : start + length]


def net() -> nn.Sequential:
    made = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 10)
    )
    generator = torch.Generator().manual_seed(1)  # threads share the global one
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
    return made


def trained(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 3, 8, 8, generator=generator)
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()


def write(path: Path, state: State, group: Any, rank: int, step: int = 7) -> Any:
    staging = Staging(at_once=False)
    captured = staging.begin(state.capture(step))
    staging.copy()
    flat, paths = captured.flat(rank, frozenset({"rng"}))
    planner = dcp.Planner()
    metadata, _ = dcp.save(
        flat,
        paths,
        planner,
        path,
        FileOps(),
        group=group,
        prepare=lambda: path.mkdir(exist_ok=True),
    )
    planner.forget()
    return metadata


def read(
    path: Path, metadata: Any, state: State, group: Any, *, world: int = 1, saved_world: int = 1
) -> None:
    saved = saved_in(metadata)
    assert state.missing(saved) == []
    request = state.request(saved, world, saved_world)
    targets = dict(request.targets)
    dcp.load(targets, metadata, Files(path), group)
    state.restore(request, targets)


def weights(model: nn.Module) -> list[torch.Tensor]:
    full = [
        t.full_tensor() if hasattr(t, "full_tensor") else t for t in model.state_dict().values()
    ]
    return [t.clone() for t in full]


def moments(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [value for one in optim.state.values() for _, value in sorted(one.items())]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in held]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("saves", [1, 3])
@pytest.mark.parametrize("loads", [1, 2, 4])
def test_parameters_and_moments_survive_another_number_of_ranks(
    tmp_path: Path, saves: int, loads: int
) -> None:
    def save(mesh: Mesh) -> Any:
        model = net()
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        trained(model, optim)
        [group] = cpu_groups(None, 1, 20)
        state = State({"model": model, "optim": optim}, mesh.rank)
        metadata = write(tmp_path / "s", state, group, mesh.rank)
        return metadata, weights(model), moments(optim)

    metadata, expected, expected_moments = run_ranks(saves, save)[0]

    def load(mesh: Mesh) -> None:
        model = net()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optim = torch.optim.AdamW(model.parameters(), lr=0.3, betas=(0.1, 0.2))
        state = State({"model": model, "optim": optim}, mesh.rank)
        [group] = cpu_groups(None, 1, 20)
        read(tmp_path / "s", metadata, state, group, world=mesh.size, saved_world=saves)
        assert state.step == 7
        assert all(map(torch.equal, weights(model), expected))
        assert all(map(torch.equal, moments(optim), expected_moments))
        assert (optim.param_groups[0]["lr"], optim.param_groups[0]["betas"]) == (0.1, (0.9, 0.999))

    run_ranks(loads, load)


@pytest.mark.long
@pytest.mark.parametrize(("saves", "loads"), [(2, 3), (3, 2), (2, 1)])
def test_sharded_parameters_survive_another_number_of_ranks(
    tmp_path: Path, saves: int, loads: int
) -> None:
    def made(mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        if mesh.size > 1:
            fully_shard(model, mesh=mesh.device_mesh["data"]).set_force_sum_reduction_for_comms(
                True
            )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def save(mesh: Mesh) -> Any:
        model, optim = made(mesh)
        trained(model, optim)
        [group] = cpu_groups(None, 1, 20)
        metadata = write(
            tmp_path / "s", State({"model": model, "optim": optim}, mesh.rank), group, mesh.rank
        )
        return metadata, weights(model), moments(optim)

    metadata, expected, expected_moments = run_ranks(saves, save)[0]

    def load(mesh: Mesh) -> None:
        model, optim = made(mesh)
        [group] = cpu_groups(None, 1, 20)
        state = State({"model": model, "optim": optim}, mesh.rank)
        read(tmp_path / "s", metadata, state, group, world=mesh.size, saved_world=saves)
        assert all(map(torch.equal, weights(model), expected))
        assert all(map(torch.equal, moments(optim), expected_moments))

    run_ranks(loads, load)


def draws() -> tuple[float, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_generators_are_those_of_each_rank(tmp_path: Path) -> None:
    """Threads share the generators, so ranks take turns."""

    def check(mesh: Mesh) -> None:
        state = State({}, mesh.rank)
        for rank in range(mesh.size):
            if rank == mesh.rank:
                random.seed(rank)
                np.random.seed(rank)  # noqa: NPY002
                torch.manual_seed(rank)
                staging = Staging(at_once=True)
                captured = staging.begin(state.capture(1))
            dist.barrier()
        [group] = cpu_groups(None, 1, 20)
        flat, paths = captured.flat(mesh.rank, frozenset({"rng"}))
        planner = dcp.Planner()
        metadata, _ = dcp.save(
            flat, paths, planner, tmp_path / "s", FileOps(), group=group,
            prepare=lambda: (tmp_path / "s").mkdir(exist_ok=True),
        )  # fmt: skip
        planner.forget()
        request = state.request(saved_in(metadata), mesh.size, mesh.size)
        targets = dict(request.targets)
        dcp.load(targets, metadata, Files(tmp_path / "s"), group)
        for rank in range(mesh.size):
            if rank == mesh.rank:
                state.restore(request, targets)
                drawn = draws()
                random.seed(rank)
                np.random.seed(rank)  # noqa: NPY002
                torch.manual_seed(rank)
                assert drawn == draws()
            dist.barrier()

    before = torch.get_rng_state()
    run_ranks(3, check)
    torch.set_rng_state(before)


def test_schedulers_scalers_and_dicts_come_back(tmp_path: Path) -> None:
    def objects(mark: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=mark, momentum=0.5)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optim, milestones=[1, 2, 2], gamma=0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        return {
            "model": model,
            "optim": optim,
            "schedule": schedule,
            "average": average,
            "notes": {"best": mark, "history": [1, (2, "x")], "counts": Counter({3: 4})},
            "scale": torch.tensor([mark]),
        }

    first = objects(0.5)
    first["optim"].step()
    first["schedule"].step()
    first["average"].update_parameters(first["model"])
    first["notes"]["array"] = np.arange(3, dtype=np.uint16)
    metadata = write(tmp_path / "s", State(first, 0), None, 0)
    second = objects(0.25)
    read(tmp_path / "s", metadata, State(second, 0), None)
    assert second["schedule"].state_dict() == first["schedule"].state_dict()
    assert second["optim"].param_groups[0]["lr"] == 0.25
    assert (
        second["notes"].pop("array").tolist() == first["notes"].pop("array").tolist() == [0, 1, 2]
    )
    assert second["notes"] == first["notes"]
    assert second["scale"].item() == 0.5
    assert torch.equal(second["average"].module.weight, first["model"].weight)
    assert second["average"].n_averaged == 1


def test_plain_torch_reads_what_was_written(tmp_path: Path) -> None:
    import pickle

    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optim)
    metadata = write(tmp_path / "s", State({"model": model, "optim": optim}, 0), None, 0)
    (tmp_path / "s" / ".metadata").write_bytes(pickle.dumps(metadata))
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    other = net()
    nn.init.zeros_(other[0].weight)  # pyright: ignore[reportArgumentType]
    theirs = torch.optim.AdamW(other.parameters(), lr=0.2)
    weights_of, kept = get_state_dict(other, theirs)
    wanted = {"model": weights_of, "optim": kept}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(wanted, storage_reader=FileSystemReader(tmp_path / "s"))
    set_state_dict(
        other, theirs, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"]
    )
    assert all(map(torch.equal, weights(other), weights(model)))
    assert all(map(torch.equal, moments(theirs), moments(optim)))
    assert theirs.param_groups[0]["lr"] == 0.1


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(UsageError, match=r"notes\.bad.*function.*cannot be stored"):
        State({"notes": {"bad": test_plain_torch_reads_what_was_written}}, 0).capture(1)
    with pytest.raises(UsageError, match="cannot be restored"):
        State({"thing": 3}, 0)
    with pytest.raises(UsageError, match="taken"):
        State({"rng": {}}, 0)


def test_another_model_is_refused(tmp_path: Path) -> None:
    metadata = write(tmp_path / "s", State({"model": net()}, 0), None, 0)
    other = State({"model": nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(2, 2))}, 0)
    saved = saved_in(metadata)
    assert other.missing(saved) == []
    with pytest.raises(
        UsageError, match=r"model\.0\.weight is 8x3x3x3, in the checkpoint 16x3x3x3"
    ):
        other.request(saved, 1, 1)
    assert State({"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}, 0).missing(saved) == [
        "model.weight", "model.bias", "ema (all of it)",
    ]  # fmt: skip


def test_what_changes_while_it_is_copied_is_noticed() -> None:
    model = nn.Linear(300, 300)
    staging = Staging(at_once=False)
    staging.begin(State({"model": model}, 0).capture(1))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CheckpointError, match=r"model\.weight changed while being copied"):
        staging.copy()


def test_copies_do_not_follow_the_step_after(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    staging = Staging(at_once=False)
    captured = staging.begin(State({"model": model}, 0).capture(1))
    staging.copy()
    with torch.no_grad():
        model.weight.add_(1)
    [entry] = [e for e in captured.parts["model"] if e.path == ("weight",)]
    assert torch.equal(entry.value, before)
    memory = entry.value.data_ptr()
    again = staging.begin(State({"model": model}, 0).capture(2))
    staging.copy()
    [entry] = [e for e in again.parts["model"] if e.path == ("weight",)]
    assert entry.value.data_ptr() == memory


def ordered() -> dict[str, Any]:
    """Tensors of many sizes and values in no order of their own."""
    kinds = (lambda i: torch.full((1 << i % 7,), float(i)), lambda i: [i], lambda i: f"text {i}")
    names = [f"{7 * i % 24:02}" for i in range(24)]
    inner = {name: kinds[i % 3](i) for i, name in enumerate(names)}
    return {**{f"z{name}": kinds[i % 3](i) for i, name in enumerate(names)}, "inner": inner, "a": 1}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dicts_come_back_with_their_keys_in_order(ranks: int, tmp_path: Path) -> None:
    def check(mesh: Mesh, loads: bool) -> None:
        state = {} if loads else ordered()
        name = f"node-{mesh.rank}"
        with Checkpointer(
            tmp_path / "far", mesh, local=tmp_path / name, node=name, state=state
        ) as ckpt:
            if loads:
                assert ckpt.load() == 2
                assert list(state) == list(ordered())
                assert list(state["inner"]) == list(ordered()["inner"])
            else:
                ckpt.save(1)
                ckpt.save(2)

    run_ranks(ranks, check, False)
    run_ranks(ranks, check, True)
