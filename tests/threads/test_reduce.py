"""Gradients summed in buckets, whatever the buckets hold and whenever their gradients come."""

import copy
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.mesh import Mesh
from fivefold.parallel import buckets, parallelize
from fivefold.parallel.buckets import packed
from fivefold.parallel.reduce import Bucketed
from gates import Gate, X, Y, chosen
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:whether the samples of a batch depend on each other in the net was not checked"
)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def equal(got: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        g is e if e is None or g is None else torch.allclose(g.to_dense(), e.to_dense(), rtol=1e-12)
        for g, e in zip(got, expected, strict=True)
    )


@pytest.fixture(params=[1, 40, 1 << 20], ids=["one parameter each", "several", "one"])
def _bucket_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", request.param)
    monkeypatch.setattr(buckets, "OTHER_BYTES", request.param)


@pytest.mark.usefixtures("_bucket_bytes")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_size_of_bucket_gives_the_gradients_of_one_process(ranks: int) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain = copy.deepcopy(net)
    F.mse_loss(plain(X), Y).backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return gradients(model)

    for got in run_ranks(ranks, check):
        assert equal(got, gradients(plain))


@pytest.mark.usefixtures("_bucket_bytes")
def test_parts_used_by_some_ranks_by_none_and_in_some_steps() -> None:
    net = Gate()
    uses = [lambda _x: "ab", lambda x: "c" if bool(x[0, 0] > 10) else "a", lambda _x: "abc"]
    x = X.clone()
    x[0, 0] = 11.0  # the first rank alone sees it

    plain, expected = copy.deepcopy(net), []
    for use in uses:
        plain.use = lambda rows, use=use: use(rows)
        halves = [plain(x[:3]), plain(x[3:])]
        (F.mse_loss(torch.cat(halves), Y)).backward()
        expected.append(gradients(plain))

    def check(mesh: Mesh) -> list[list[Tensor | None]]:
        mine = copy.deepcopy(net)
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        found = []
        for use in uses:
            mine.use = use
            model.step(*model.shard(x, Y))  # accumulates
            found.append(gradients(model))
        return found

    for found in run_ranks(2, check):
        assert found[0][4:] == [None, None]
        assert all(equal(g, e) for g, e in zip(found, expected, strict=True))


def test_parameters_may_be_frozen_and_thawed_between_steps() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()

    def steps(net: nn.Module, step: Callable[[], Any]) -> list[list[Tensor | None]]:
        found = []
        for frozen in (True, False, True):
            net[0].requires_grad_(not frozen)
            net.zero_grad()
            step()
            found.append(gradients(net))
        return found

    plain = copy.deepcopy(net)
    expected = steps(plain, lambda: F.mse_loss(plain(X), Y).backward())

    def check(mesh: Mesh) -> list[list[Tensor | None]]:
        mine = copy.deepcopy(net)
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        return steps(mine, lambda: model.step(*model.shard(X, Y)))

    for found in run_ranks(2, check):
        assert all(equal(g, e) for g, e in zip(found, expected, strict=True))


def test_sparse_gradients_stay_sparse() -> None:
    net = nn.EmbeddingBag(9, 3, sparse=True).double()
    words = torch.tensor([[0, 1], [1, 8], [3, 3], [8, 0]])
    plain = copy.deepcopy(net)
    F.mse_loss(plain(words), Y[:4]).backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        model.step(*model.shard(words, Y[:4]))
        return gradients(model)

    for (got,) in run_ranks(2, check):
        assert got is not None
        assert got.is_sparse
        assert equal([got], gradients(plain))


def test_a_bare_backward_averages_as_distributed_data_parallel_does() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def check(mesh: Mesh) -> tuple[list[Tensor | None], list[Tensor | None]]:
        mine, theirs = parallelize(copy.deepcopy(net), mesh), copy.deepcopy(net)
        ddp = DistributedDataParallel(theirs, process_group=mesh.group("data"))
        x, y = mine.shard(X, Y)
        for _ in range(2):
            F.mse_loss(mine(x), y).backward()
            F.mse_loss(ddp(x), y).backward()
        return gradients(mine), gradients(theirs)

    for ours, theirs in run_ranks(3, check):
        assert equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:the loss .<lambda>.")
def test_the_loss_travels_with_the_gradients_where_they_have_its_dtype() -> None:
    def check(mesh: Mesh, dtype: torch.dtype) -> tuple[float, torch.dtype]:
        model = parallelize(
            nn.Linear(4, 3).to(dtype), mesh, loss=lambda o, t: (o.double() - t).square().mean()
        )
        whole = model.step(*model.shard(X.to(dtype), Y))
        return whole.item(), whole.dtype

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = run_ranks(2, check, dtype)
        assert values[0] == values[1]
        assert values[0][1] == torch.float64


def test_buckets_keep_dtypes_apart_and_start_small() -> None:
    parameters = [nn.Parameter(torch.zeros(300_000)) for _ in range(4)]
    parameters.insert(1, nn.Parameter(torch.zeros(5, dtype=torch.float64)))
    held = [[p.numel() for p in bucket.parameters] for bucket in packed(parameters)]
    assert held == [[300_000], [300_000, 300_000], [5], [300_000]]


def test_channels_last_weights_keep_their_memory_order() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def check(mesh: Mesh) -> bool:
        mine = copy.deepcopy(conv)
        reduced = Bucketed(mine, mesh.group("data"), share_buffers=False)
        reduced.begin()
        reduced.backward(mine(torch.ones(2, 3, 5, 5)).sum(), lambda loss: loss)
        assert mine.weight.grad is not None
        return mine.weight.grad.is_contiguous(memory_format=torch.channels_last)

    assert all(run_ranks(2, check))


@pytest.mark.usefixtures("_bucket_bytes")
def test_ranks_that_use_different_parts_above_a_batch_norm_keep_their_messages_apart() -> None:
    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
            self.gate = Gate()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.norm(self.first(x)))

    net = Above()

    def by_half(rows: Tensor) -> Tensor:
        y = net_plain.norm(net_plain.first(rows))
        return torch.cat(
            [net_plain.gate.a(y[:3]) + net_plain.gate.c(y[:3]), net_plain.gate.b(y[3:])]
        )

    net_plain = copy.deepcopy(net)
    F.mse_loss(by_half(X), Y).backward()

    def check(mesh: Mesh) -> list[Tensor | None]:
        mine = copy.deepcopy(net)
        mine.gate.use = chosen("ac" if mesh.rank == 0 else "b")
        model = parallelize(mine, mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return gradients(model)

    for got in run_ranks(2, check, timeout_s=30):
        assert equal(got, gradients(net_plain))


def test_a_model_that_is_gone_leaves_no_threads() -> None:
    def check(mesh: Mesh) -> None:
        model = parallelize(nn.Linear(4, 3).double(), mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))

    run_ranks(2, check)
    before = psutil.Process().num_threads()
    for _ in range(3):
        run_ranks(2, check)
    assert psutil.Process().num_threads() <= before
