"""What follows the number of samples, or what an earlier step has left: as in one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fivefold import clip_grad_norm_
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan
from joined import (
    CHECKED,
    DATA,
    PIPE,
    USER,
    Call,
    Images,
    Net,
    batches,
    expect_exact,
    made,
    plan_for,
    refusal,
)
from ranks import run_ranks

pytestmark = [
    CHECKED,
    pytest.mark.filterwarnings("ignore:the net does not compute the same twice"),
]
EVEN, ODD, FEW = (6, 6, 6, 6), (5, 7, 5, 6), (2, 2, 5, 2)


def held() -> dict[str, Any]:
    return {
        "p": nn.Parameter(torch.linspace(-1, 1, 6)),
        "q": nn.Parameter(torch.linspace(1, 2, 6)),
        "k": 1,
        "norm": nn.BatchNorm1d(6),
        "counts": nn.Embedding(9, 6),
        "draw": torch.Generator().manual_seed(3),
    }


def swapped(_net: Any, h: Tensor) -> Tensor:
    a, b = h * 2, h * 3
    return a - b if len(h) <= 4 else b - a


def set_and_read(net: Any, h: Tensor) -> Tensor:
    k, net.k = net.k, len(h)
    return h * k


def seen(net: Any, h: Tensor) -> Tensor:
    k, net.k = net.k, net.k + len(h)
    return h / k


def other_written(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        (net.p if len(h) <= 4 else net.q).add_(0.1)
    return h * net.p + net.q


def without_gradients(net: Any, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(len(h) > 4):
        gate = torch.sigmoid(h * net.p)
    return h * gate


def with_momentum(net: Any, h: Tensor) -> Tensor:
    net.norm.momentum = 1.0 / len(h)
    return net.norm(h)


COUNTS: dict[str, Call] = {
    "narrow": lambda _n, h: h * h.narrow(1, h.shape[0] % 3, 3).sum(1, keepdim=True),
    "table": lambda net, h: h + net.p.narrow(0, len(h) % 5, 1),
    "as_strided": lambda net, h: h + net.q.as_strided((1,), (1,), len(h) % 6),
    "parity": lambda _n, h: h * 2 if h.shape[0] % 2 else h * 3,
    "two": lambda _n, h: h * 2 if len(h) == 2 else h * 3,
    "constant": lambda _n, h: h * torch.from_numpy(np.full((1, 6), 1 / len(h))),
    "parameter": lambda net, h: h + (net.p if len(h) <= 4 else net.q),
    "embedding": lambda net, h: h + net.counts(torch.tensor(len(h))),
    "swapped": swapped, "set and read": set_and_read, "seen": seen, "other written": other_written,
    "without gradients": without_gradients,
    "own generator": lambda net, h: h + torch.randn(h.shape, generator=net.draw, dtype=h.dtype),
}  # fmt: skip


@pytest.mark.long(every=8)
@pytest.mark.parametrize("rows", [EVEN, ODD], ids=str)
@pytest.mark.parametrize("which", COUNTS)
def test_what_follows_the_number_of_samples(which: str, rows: tuple[int, ...]) -> None:
    expect_exact(DATA, COUNTS[which], held, rows=rows)


@pytest.mark.parametrize("which", ["parity", "two", "parameter", "seen"])
def test_the_number_of_samples_is_that_of_the_batch_where_ranks_have_none(which: str) -> None:
    expect_exact(Layout(data=3), COUNTS[which], held, rows=FEW)


def made_anew(_net: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=torch.Generator().manual_seed(3), dtype=h.dtype)


@pytest.mark.parametrize(
    ("middle", "words"),
    [(with_momentum, "options (training, momentum, eps)"), (made_anew, "that no module holds")],
)
def test_what_a_run_would_read_too_late_is_refused(middle: Call, words: str) -> None:
    assert words in refusal(PIPE, middle, held)


def kept(net: Any, h: Tensor) -> Tensor | None:
    before, net.before = getattr(net, "before", None), h.detach()
    return before


def mean_before(net: Any, h: Tensor) -> Tensor:
    before = kept(net, h)
    return h if before is None else h + before.mean(0)


def memory(net: Any, h: Tensor) -> Tensor:
    before = kept(net, h)
    return h if before is None else h + (h @ before.t()).softmax(1) @ before


def first_before(net: Any, h: Tensor) -> Tensor:
    before = kept(net, h)
    return h if before is None else h + before[0]


def flipped(net: Any, h: Tensor) -> Tensor:
    before = kept(net, h)
    return h if before is None or before.shape != h.shape else h + before.flip(0)


def own_before(net: Any, h: Tensor) -> Tensor:
    before = kept(net, h)
    return h if before is None or before.shape != h.shape else h + before


def in_a_dict(net: Any, h: Tensor) -> Tensor:
    before, net.cache["last"] = net.cache.get("last"), h.detach()
    return h if before is None else h + before.mean(0)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("rows", [EVEN, ODD], ids=str)
@pytest.mark.parametrize(
    "middle", [mean_before, memory, first_before, flipped, own_before, in_a_dict]
)
def test_samples_that_an_earlier_step_has_left(middle: Call, rows: tuple[int, ...]) -> None:
    expect_exact(DATA, middle, lambda: {"cache": {}}, rows=rows)


def test_samples_that_an_evaluation_has_left() -> None:
    (x, y), *_ = [(x.double(), y.double()) for x, y in batches(Net, EVEN)]

    def check(mesh: Mesh) -> None:
        net = made(Net, mean_before, dict)
        one = copy.deepcopy(net)
        model = parallelize(net, mesh, loss=nn.MSELoss())
        model.eval()
        with torch.no_grad():
            model(model.shard(x))
            one(x)
        model.train()
        told = model.step(*model.shard(x, y))
        torch.testing.assert_close(told, nn.MSELoss()(one(x), y).detach())
        with pytest.raises(UsageError, match="samples depend on each other in mean"):
            model(model.shard(x))

    run_ranks(DATA, check)


def test_what_is_no_tensor_among_the_outputs() -> None:
    class Counted(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), 1 / len(x)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return (outputs[0] - targets).square().sum() * outputs[1]

    expect_exact(DATA, lambda _n, h: h, kind=Counted, criterion=lambda: loss, rows=EVEN)


# ---- replicas that stop to be alike


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", [DATA, Layout(data=2, width=2)], ids=str)
def test_weights_that_one_rank_alone_has_loaded_are_told(layout: Layout, steps: int) -> None:
    kind = Net if layout is DATA else Images

    def check(mesh: Mesh) -> None:
        net = made(kind, lambda _n, h: h, dict)
        x, y = (t.double() for t in batches(kind)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        for _ in range(steps):
            model.step(*model.shard(x, y))
        if mesh.rank == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        with pytest.raises(
            UsageError,
            match=f"replicas hold different parameters before step {steps + 1}: 'first",
        ):
            model.step(*model.shard(x, y))

    run_ranks(layout, check)


# ---- evaluation, clipping, losses


class Merging(nn.Linear):
    """As LoRA layers: merges a part of its weights for evaluation, and parts it again for training."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.low, self.merged = nn.Parameter(torch.ones(6, 6) * 0.1), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += self.low.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.low.t()


@pytest.mark.parametrize("layout", [Layout(), DATA, PIPE], ids=str)
def test_evaluation_calls_train_again(layout: Layout) -> None:
    data = [(x.double(), y.double()) for x, y in batches(Net)]

    def check(mesh: Mesh) -> None:
        net = made(Net, lambda net, h: net.layer(h), lambda: {"layer": Merging()})
        net.first.eval()
        one = copy.deepcopy(net)
        model = parallelize(net, mesh, example=data[0][0], loss=nn.MSELoss())
        for x, y in data:
            told = model.step(*model.shard(x, y))
            torch.testing.assert_close(told, nn.MSELoss()(one(x), y).detach())
            model.evaluate(*model.shard(x, y), lambda o, t: (o - t).square().sum().double().view(1))
            assert (net.layer.training, net.layer.merged, net.first.training) == (
                True,
                False,
                False,
            )

    run_ranks(layout, check, plan=plan_for(layout))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: (o - t).square().mean().detach(), "has no gradient, though the outputs have"),
        (lambda o, t: ((o - t).square().mean(), {"logs": 1}), "gave tuple instead of a tensor"),
    ],
)
def test_losses_without_gradient_and_losses_with_more_are_told(loss: Any, words: str) -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=loss)
        with pytest.raises(UsageError, match=words):
            model.step(*model.shard(x, y))

    run_ranks(DATA, check)


def test_a_norm_that_counts_is_refused_where_ranks_hold_parts() -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        with pytest.raises(UsageError, match="norm_type = 0 counts tensors"):
            clip_grad_norm_(model, 1.0, 0.0)
        assert clip_grad_norm_(model, 1.0, float("inf")) > 0

    run_ranks(DATA, check, plan=Plan(layout=DATA).replace({"memory.shard": "optimizer"}, USER))


def test_a_single_number_crosses_between_stages() -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h[:, :1].expand(-1, 6) * h[:, 0].unsqueeze(1), dict)
        one = copy.deepcopy(net)
        x, y = (t.double()[:2] for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        expected = nn.MSELoss()(one(x), y).detach()
        torch.testing.assert_close(model.step(x, y), expected)

    plan = Plan(layout=PIPE).replace({"pipeline.micro_batches": 2, "pipeline.cut": "last"}, USER)
    run_ranks(PIPE, check, plan=plan)


@pytest.mark.parametrize("layout", [DATA, Layout(data=2, pipe=2)], ids=str)
def test_batch_norm_of_one_sample_of_a_replicas_own_is_told(layout: Layout) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net, (2,) * 4)[0])
        net = made(Net, lambda n, h: n.norm(h), lambda: {"norm": nn.BatchNorm1d(6)})
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        with pytest.raises(UsageError, match=r"(?i)expect.* more than 1 value per channel"):
            model.step(*model.shard(x, y))

    run_ranks(
        layout, check, plan=plan_for(layout).replace({"parallel.batch_norm": "replica"}, USER)
    )
