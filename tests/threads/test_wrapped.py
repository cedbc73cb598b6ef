"""A parallel model where a script takes it for the plain net: copied, pickled, moved, its state read."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fivefold.checkpoint import Checkpointer
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize
from fivefold.plan import Layout
from joined import CHECKED, DATA, PIPE, USER, WIDTH, Images, Net, batches, made, plan_for
from ranks import run_ranks

pytestmark = CHECKED
LAYOUTS = pytest.mark.parametrize("layout", [Layout(), DATA, PIPE, WIDTH], ids=str)


def on_ranks(layout: Layout, check: Callable[[ParallelModel, list[Any]], None]) -> None:
    kind = Images if layout.width > 1 else Net

    def run(mesh: Mesh) -> None:
        data = [(x.double(), y.double()) for x, y in batches(kind)]
        net = made(kind, lambda _net, h: h, dict)
        check(parallelize(net, mesh, example=data[0][0], loss=nn.MSELoss()), data)

    run_ranks(layout, run, plan=plan_for(layout))


@LAYOUTS
@pytest.mark.parametrize("how", [copy.deepcopy, AveragedModel, pickle.dumps])
def test_a_copy_of_a_parallel_model_is_refused_in_words(
    layout: Layout, how: Callable[[Any], Any]
) -> None:
    def check(model: ParallelModel, _data: list[Any]) -> None:
        with pytest.raises(UsageError, match=r"AveragedModel\(model\.module\)"):
            how(model)

    on_ranks(layout, check)


@LAYOUTS
def test_an_average_of_the_net_follows_it(layout: Layout) -> None:
    def check(model: ParallelModel, data: list[Any]) -> None:
        average = AveragedModel(model.module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wanted = [torch.zeros_like(p) for p in model.parameters()]
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            model.step(*model.shard(x, y))
            optimizer.step()
            average.update_parameters(model.module)
            for mean, parameter in zip(wanted, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 1 / (number + 1))
        found = [p for p in average.module.parameters() if not p.is_meta]
        torch.testing.assert_close(found, wanted)
        every = model.full_state_dict(of=average.module)
        assert every.keys() == model.full_state_dict().keys()
        for (name, _), mean in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(every[name], mean)

    on_ranks(layout, check)


def test_an_average_of_a_net_in_stages_is_saved_whole(tmp_path: Path) -> None:
    def averaged(mesh: Mesh, saves: bool) -> dict[str, Any]:
        x, y = (t.double() for t in batches(Net)[0])
        net = made(Net, lambda _net, h: h, dict)
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        average = AveragedModel(model.module)
        near = tmp_path / "near"
        with Checkpointer(
            tmp_path / "far", mesh, local=near, every=1, model=model, average=average
        ) as ckpt:
            if saves:
                optimizer = torch.optim.SGD(model.parameters(), 0.5)
                for _ in range(2):
                    model.step(*model.shard(x, y))
                    optimizer.step()
                    average.update_parameters(model.module)
                assert ckpt.maybe_save(2)
            else:
                assert ckpt.load() == 2
            assert average.n_averaged == 2
            return model.full_state_dict(of=average.module)

    saved, _ = run_ranks(PIPE, averaged, True, plan=plan_for(PIPE))
    for layout in (Layout(), PIPE):
        for loaded in run_ranks(layout, averaged, False, plan=plan_for(layout)):
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def test_inputs_and_targets_have_as_many_samples() -> None:
    def check(model: ParallelModel, data: list[Any]) -> None:
        x, y = data[0]
        with pytest.raises(UsageError, match="5 inputs and 3 targets"):
            model.shard(x, y[:3])

    on_ranks(DATA, check)


@LAYOUTS
def test_a_model_may_be_moved_and_converted(layout: Layout) -> None:
    def check(model: ParallelModel, data: list[Any]) -> None:
        assert model.to("cpu") is model
        model.step(*model.shard(*data[0]))
        model.float().to(torch.device("cpu"))
        assert {p.dtype for p in model.module.parameters()} == {torch.float32}
        model.zero_grad()
        x, y = data[1]
        told = model.step(*model.shard(x.float(), y.float()))
        assert told.dtype == torch.float32
        model.double().zero_grad()
        again = model.step(*model.shard(x, y))
        torch.testing.assert_close(told.double(), again, rtol=1e-5, atol=1e-6)

    on_ranks(layout, check)


def test_the_state_of_another_stage_is_told_and_files_hold_what_torch_writes() -> None:
    def check(model: ParallelModel, _data: list[Any]) -> None:
        state = model.state_dict()
        there = "last.weight" if "first.weight" in state else "first.weight"
        assert there not in state
        assert state.get(there) is None
        with pytest.raises(UsageError, match=rf"'{there}' is in a stage of another rank"):
            state[there]
        with pytest.raises(KeyError, match="nothing"):
            state["nothing"]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is OrderedDict
        assert loaded.keys() == state.keys()
        model.load_state_dict(loaded)

    on_ranks(PIPE, check)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_divided_parameters_keep_their_dtype(shard: str) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _net, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        model.to("cpu").step(*model.shard(x, y))
        with pytest.raises(UsageError, match="convert the net before parallelize"):
            model.float()
        model.double().step(*model.shard(x, y))

    run_ranks(DATA, check, plan=plan_for(DATA).replace({"memory.shard": shard}, USER))


class Half(nn.Module):
    """Of whose two stages one has nothing to train: the first is frozen, or the second without parameters."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3) if frozen else nn.Softmax(1)
        self.middle = nn.Tanh()
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x)))


def trained(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], step: Callable[..., Any]
) -> torch.optim.Optimizer:
    """With a scaler, of whose steps one overflows; the scale has to be the same on all ranks."""
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, 0.1, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        step(x * torch.inf if number == 1 else x, y, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0 * 2 ** (len(data) - 1) / 2
    return optimizer


@pytest.mark.parametrize("frozen", [True, False])
def test_ranks_that_have_nothing_to_train(frozen: bool, tmp_path: Path) -> None:
    data = [(torch.randn(6, 5), torch.randn(6, 3 if frozen else 40)) for _ in range(3)]
    plain = Half(frozen)

    def plainly(x: Tensor, y: Tensor, scaler: Any) -> None:
        scaler.scale(nn.MSELoss()(plain(x), y)).backward()

    trained(plain, data, plainly)
    wanted = plain.state_dict()
    nets = [Half(frozen) for _ in range(3)]
    cut = "middle" if frozen else "second"

    def check(mesh: Mesh) -> None:
        model = parallelize(nets[mesh.rank], mesh, example=data[0][0], loss=nn.MSELoss())

        def step(x: Tensor, y: Tensor, scaler: Any) -> None:
            model.step(*model.shard(x, y), scaler=scaler)

        optimizer = trained(model, data, step)
        torch.testing.assert_close(model.full_state_dict(), wanted)
        with Checkpointer(
            tmp_path / "far",
            mesh,
            local=tmp_path / "near",
            every=1,
            model=model,
            optimizer=optimizer,
        ) as checkpoints:
            assert checkpoints.maybe_save(3)

    layout = Layout(pipe=2)
    plan = plan_for(layout).replace({"pipeline.cut": cut}, USER)
    run_ranks(layout, check, plan=plan)

    def go_on(mesh: Mesh) -> None:
        model = parallelize(Half(frozen), mesh, example=data[0][0], loss=nn.MSELoss())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.3)
        with Checkpointer(
            tmp_path / "far", mesh, local=tmp_path / "near", model=model, optimizer=optimizer
        ) as checkpoints:
            assert checkpoints.load() == 3
        torch.testing.assert_close(model.full_state_dict(), wanted)
        assert optimizer.param_groups[0]["lr"] == 0.1
        model.step(*model.shard(*data[0]))
        optimizer.step()

    run_ranks(layout, go_on, plan=plan)
    run_ranks(Layout(), go_on)
