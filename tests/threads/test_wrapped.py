"""A parallel model where a script takes it for the plain net: copied, pickled, moved, its state read."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize
from fivefold.plan import Layout
from joined import CHECKED, DATA, PIPE, WIDTH, Images, Net, batches, made, plan_for
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

    on_ranks(layout, check)


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
