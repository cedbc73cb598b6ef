"""Gradients of divided parameters: used, unused, stood in for, frozen, clipped, scaled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import clip_grad_norm_, gathering, parallelize
from fivefold.plan import Layout, Parallel
from gates import Gate, chosen
from ranks import run_ranks
from sharding import BOTH, Dropped, X, Y, close, gradients, on, plan_of, small

pytestmark = pytest.mark.filterwarnings(
    "ignore:whether the samples of a batch depend on each other in the net was not checked"
)


@pytest.fixture
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the smallest nets are units of their own."""
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_steps_accumulate_and_what_no_rank_uses_has_no_gradient(shard: str) -> None:
    net = Gate()

    def steps(net: Gate, step: Callable[[], Any]) -> list[list[Tensor | None]]:
        found = []
        for use in ("ab", "a", "abc"):
            net.use = lambda _x, use=use: use
            step()
            found.append(gradients(net))
        return found

    plain = copy.deepcopy(net)
    expected = steps(plain, lambda: F.mse_loss(plain(X), Y).backward())
    assert expected[1][4:] == [None, None]

    def check(mesh: Mesh) -> list[list[Tensor | None]]:
        mine = copy.deepcopy(net)
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        return steps(mine, lambda: model.step(*model.shard(X, Y)))

    for found in on(shard, 2, check):
        assert all(close(g, e) for g, e in zip(found, expected, strict=True))


def test_what_stays_with_the_net_accumulates_though_a_step_does_not_use_it() -> None:
    def check(mesh: Mesh) -> list[list[Tensor | None]]:
        net = Gate()  # smaller than a unit: all of it is the net's own
        model = parallelize(net, mesh, loss=nn.MSELoss())
        found = []
        for use in ("ab", "a"):
            net.use = lambda _x, use=use: use
            model.step(*model.shard(X, Y))
            found.append(gradients(net))
        return found

    for first, second in on("parameters", 2, check):
        assert close(second[2:], first[2:])
        assert not close(second[:2], first[:2])


def test_a_torch_that_cannot_sum_unequal_parameters_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)

    def check(mesh: Mesh) -> None:
        net = Gate()
        net.use = lambda _x: "abc"
        model = parallelize(net, mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        net.use = chosen("ac"[mesh.rank])  # of equal size: the backend sees no difference
        with pytest.raises(UsageError, match=r"torch 2\.13 can"):
            model.step(*model.shard(X, Y))

    on("parameters", 2, check)


@pytest.mark.parametrize(
    "shard",
    [
        "optimizer",
        pytest.param("parameters", marks=pytest.mark.skipif(
            not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
            reason="torch sums parameters of a unit that not all ranks used from 2.13 on; refused before",
        )),
    ],
)  # fmt: skip
def test_ranks_may_use_different_parameters_of_what_is_gathered_together(shard: str) -> None:
    net = Gate()
    plain = copy.deepcopy(net)
    halves = [plain.a(X[:3]), plain.c(X[3:])]
    F.mse_loss(torch.cat(halves), Y).backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        mine = copy.deepcopy(net)
        mine.use = chosen("ac"[mesh.rank])
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return gradients(mine)

    for found in on(shard, 2, check):  # as large as a unit is by default, both are one
        assert close(found, gradients(plain))


@pytest.mark.usefixtures("_layer_by_layer")
@pytest.mark.parametrize("uses", [("a", "b"), ("ab", "a"), ("b", "ab"), ("ab", "ba")])
def test_ranks_that_call_different_layers_are_told_what_to_do(uses: tuple[str, str]) -> None:
    def check(mesh: Mesh) -> None:
        net = Gate()
        net.use = chosen(uses[mesh.rank])
        model = parallelize(net, mesh, loss=nn.MSELoss())
        with pytest.raises(UsageError, match=r'different modules.*memory.shard = "optimizer"'):
            model.step(*model.shard(X, Y))

    on("parameters", 2, check)


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_a_stand_in_that_gives_nan_adds_nothing(shard: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x / x.norm(dim=1, keepdim=True))  # 0 / 0 for zeros

    net = Normed()
    plain = copy.deepcopy(net)
    expected = F.mse_loss(plain(X[:2]), Y[:2])
    expected.backward()

    def check(mesh: Mesh) -> tuple[float, list[Tensor | None]]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        loss = model.step(*model.shard(X[:2], Y[:2]))
        return loss.item(), gradients(model)

    for loss, found in on(shard, 3, check):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert close(found, gradients(plain))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_parameters_may_be_frozen_and_thawed_between_steps(shard: str) -> None:
    def steps(net: nn.Module, step: Callable[[], Any]) -> list[list[Tensor | None]]:
        found = []
        for frozen in (True, False, True):
            next(net.children()).requires_grad_(not frozen)
            net.zero_grad()
            step()
            found.append(gradients(net))
        return found

    plain = small()
    expected = steps(plain, lambda: F.mse_loss(plain(X), Y).backward())

    def check(mesh: Mesh) -> list[list[Tensor | None]]:
        mine = small()
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        return steps(mine, lambda: model.step(*model.shard(X, Y)))

    for found in on(shard, 2, check):
        assert all(close(g, e) for g, e in zip(found, expected, strict=True))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_outputs_that_are_views_may_be_changed_in_place(shard: str) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)).double()
            self.last = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            flat = self.first(x)
            flat += 1
            return self.last(flat.view(-1, 4).relu_())

    net = Views()
    plain = copy.deepcopy(net)
    F.mse_loss(plain(X), Y).backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return gradients(model)

    for found in on(shard, 2, check):
        assert close(found, gradients(plain))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_replicas_with_statistics_of_their_own_do_as_without(shard: str) -> None:
    torch.manual_seed(7)
    net, x, y = Dropped().double(), torch.randn(5, 3, 6, 6).double(), torch.tensor([0, 1, 2, 3, 0])
    loss = nn.CrossEntropyLoss()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = parallelize(copy.deepcopy(net), mesh, loss=loss)
        for _ in range(2):
            model.step(*model.shard(x, y))
        return [*gradients(model), *model.buffers()]

    replica = Parallel(batch_norm="replica")
    plain, divided = (
        run_ranks(2, check, plan=plan_of(kind, 2, parallel=replica))[1] for kind in ("none", shard)
    )
    assert close([*map(as_float, divided)], [*map(as_float, plain)])


def as_float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_a_bare_backward_averages_as_distributed_data_parallel_does(shard: str) -> None:
    def check(mesh: Mesh) -> bool:
        ours, theirs = parallelize(small(), mesh, loss=nn.MSELoss()), small()
        ddp = DistributedDataParallel(theirs, process_group=mesh.group("data"))
        x, y = ours.shard(X, Y)
        for _ in range(2):
            F.mse_loss(ours(x), y).backward()
            F.mse_loss(ddp(x), y).backward()
        averaged = close(gradients(ours), gradients(theirs))
        ours.zero_grad()
        ours.step(x, y)  # sums again
        plain = small()
        F.mse_loss(plain(X), Y).backward()
        return averaged and close(gradients(ours), gradients(plain))

    assert all(on(shard, 3, check))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clipping_takes_the_norm_of_all_parts(shard: str, order: float) -> None:
    plain = small()
    F.mse_loss(plain(X), Y).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, order)

    def check(mesh: Mesh) -> tuple[float, list[Tensor | None]]:
        model = parallelize(small(), mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return clip_grad_norm_(model, 0.05, order).item(), gradients(model)

    for norm, found in on(shard, 4, check):  # parts of three rows over four ranks: one is empty
        assert norm == pytest.approx(expected.item(), rel=1e-12)
        assert close(found, gradients(plain))


@pytest.mark.parametrize(
    ("shard", "layout"),
    [
        ("optimizer", Layout(data=2)),
        ("parameters", Layout(data=2)),
        ("optimizer", Layout(data=2, pipe=2)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_an_overflow_of_any_rank_is_seen_by_all(shard: str, layout: Layout) -> None:
    def check(mesh: Mesh) -> list[tuple[float, bool]]:
        model = parallelize(small().float(), mesh, example=X.float(), loss=nn.MSELoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        found = []
        for bad in (False, True, False):
            x = X.float().clone()
            x[0, 0] = torch.inf if bad else 1.0  # the first rank has it
            before = model.full_state_dict()["0.weight"].clone()
            model.step(*model.shard(x, Y.float()), scaler=scaler)
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model, 1.0)
            assert bool(norm.isfinite()) is not bad
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = not torch.equal(model.full_state_dict()["0.weight"], before)
            found.append((scaler.get_scale(), moved))
        return found

    for found in run_ranks(layout, check, plan=plan_of(shard, layout)):
        assert found == [(16.0, True), (8.0, False), (8.0, True)]


@BOTH
def test_autocast_keeps_weights_and_gradients_in_float32(shard: str) -> None:
    plain = small().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(plain(X.float()), Y.float())
    loss.backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = parallelize(small().float(), mesh, loss=nn.MSELoss())
        with torch.autocast("cpu", torch.bfloat16):
            model.step(*model.shard(X.float(), Y.float()))
        return gradients(model)

    for found in on(shard, 2, check):
        for got, expected in zip(found, gradients(plain), strict=True):
            assert got is not None
            assert expected is not None
            assert got.dtype == torch.float32
            assert (got - expected).norm() <= 0.02 * expected.norm()
