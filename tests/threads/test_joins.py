"""Where samples, pixels or stages meet without a call that shows it: as in one process, or refused."""

from __future__ import annotations

import array
import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.parallel.torch_losses import split_loss
from fivefold.plan import Layout
from joined import (
    CHECKED,
    DATA,
    PIPE,
    WIDTH,
    Call,
    Images,
    Net,
    batches,
    expect_exact,
    made,
    plan_for,
    refusal,
    train,
)
from ranks import run_ranks

pytestmark = CHECKED
# ---- rows that are named by their number


def assigned(index: Any, value: Any = 0.5) -> Call:
    def middle(_net: Any, h: Tensor) -> Tensor:
        h = h.clone()
        h[index] = value
        return h

    return middle


def masked(_net: Any, h: Tensor) -> Tensor:
    mask = torch.ones_like(h[:, :1])
    mask[0] = 0
    return h * mask


def assigned_parameter(net: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[0] = net.weight
    return h


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
@pytest.mark.parametrize(
    "middle",
    [
        *(assigned(index) for index in (0, -1, slice(0, 1), slice(None, None, 2), (0, 0), (None, 0))),
        assigned((slice(None), 0)),
        masked,
        lambda _net, h: assigned((slice(None), 0))(_net, h.t()).t(),
        lambda _net, h: h.clone().fill_diagonal_(0.25),
    ],
)  # fmt: skip
def test_rows_that_are_assigned_are_those_of_the_whole_batch(layout: Layout, middle: Call) -> None:
    expect_exact(layout, middle)


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
def test_a_parameter_that_is_assigned_to_a_row_gets_its_gradient_once(layout: Layout) -> None:
    expect_exact(layout, assigned_parameter, lambda: {"weight": nn.Parameter(torch.ones(6))})


# ---- norms of what holds samples elsewhere, or nowhere


@pytest.mark.parametrize(
    "middle",
    [
        lambda _net, h: F.instance_norm(h.t().unsqueeze(0)).squeeze(0).t(),
        lambda _net, h: F.batch_norm(h.t().unsqueeze(0), None, None, training=True).squeeze(0).t(),
        lambda _net, h: F.batch_norm(h.t(), None, None, training=True).t(),
    ],
)
def test_norms_over_a_dim_that_holds_the_samples(middle: Call) -> None:
    expect_exact(DATA, middle)


def test_batch_norm_of_a_parameter_counts_it_once() -> None:
    held = lambda: {"norm": nn.BatchNorm1d(6), "weight": nn.Parameter(torch.randn(4, 6))}  # noqa: E731
    expect_exact(DATA, lambda net, h: h + net.norm(net.weight).sum(0), held)


# ---- backward that joins what forward does not


class Scaled(torch.autograd.Function):
    """Forward treats every number by itself, backward does not."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / (grads[0].norm() + 1e-3)


@torch.library.custom_op("fivefold_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """As `Scaled`."""
    return x * 2


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda _ctx, grad: grad / (grad.norm() + 1e-3))


def scaled_by_function(x: Tensor) -> Tensor:
    return Scaled.apply(x)


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
@pytest.mark.parametrize("function", [scaled_by_function, scaled])
def test_a_backward_of_the_users_gets_the_whole_gradient(
    layout: Layout, function: Callable[[Tensor], Tensor]
) -> None:
    expect_exact(layout, lambda _net, h: torch.tanh(function(h)))


@pytest.mark.parametrize(
    "layout", [WIDTH, Layout(height=2, width=2), Layout(data=2, width=2)], ids=str
)
def test_a_backward_of_the_users_gets_the_gradient_of_the_whole_image(layout: Layout) -> None:
    expect_exact(layout, lambda _net, h: torch.tanh(Scaled.apply(h)), kind=Images)


def test_a_function_of_weights_gets_their_whole_gradient() -> None:
    held = lambda: {"weight": nn.Parameter(torch.randn(6, 6))}  # noqa: E731
    expect_exact(DATA, lambda net, h: h @ Scaled.apply(net.weight), held)


def numbers_of(h: Tensor) -> Tensor:
    return (h.detach().abs() * 7).long() % 4


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
def test_embeddings_whose_gradients_are_divided_by_frequency(layout: Layout) -> None:
    held = lambda: {"table": nn.Embedding(4, 6, scale_grad_by_freq=True)}  # noqa: E731
    expect_exact(layout, lambda net, h: h + net.table(numbers_of(h[:, 0])), held)


# ---- what a recording does not see


@pytest.mark.parametrize("layout", [WIDTH, PIPE], ids=str)
def test_scripted_functions_are_refused(layout: Layout) -> None:
    swish = torch.jit.script(_swish)
    kind = Images if layout is WIDTH else Net
    data = [(x.double(), y.double()) for x, y in batches(kind)]

    def check(mesh: Mesh) -> None:
        net = made(kind, lambda _net, h: swish(h), dict)
        with pytest.raises(UsageError, match="calls a scripted function"):
            train(net, mesh, data)

    run_ranks(layout, check, plan=plan_for(layout))


def test_scripted_functions_are_called_where_replicas_call_the_net() -> None:
    # Stand-ins of a recording within TorchScript ended the process, at the second call.
    swish = torch.jit.script(_swish)
    expect_exact(DATA, lambda _net, h: swish(h))


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def hooked(_net: Any, h: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return torch.tanh(h)


def test_hooks_of_saved_tensors_are_refused_in_stages() -> None:
    assert "saves tensors for backward by hooks" in refusal(PIPE, hooked)


def test_hooks_of_saved_tensors_are_called_where_replicas_call_the_net() -> None:
    expect_exact(DATA, hooked)


def test_sparse_tensors_are_told_on_the_data_axis() -> None:
    middle = lambda _net, h: torch.sparse.mm(torch.eye(6).double().to_sparse(), h.t()).t()  # noqa: E731
    expect_exact(DATA, middle)


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
@pytest.mark.parametrize("kind", ["numpy", "bytearray", "array", "slots"])
def test_state_that_python_keeps(layout: Layout, kind: str) -> None:
    class Slots:
        __slots__ = ("n",)

        def __init__(self) -> None:
            self.n = 1.0

    def count(net: Any, h: Tensor) -> Tensor:
        if kind == "numpy":
            net.state += 1
            return h * float(net.state.sum())
        if kind == "slots":
            net.state.n += 1
            return h * net.state.n
        net.state.append(1)
        return h * len(net.state)

    new = {
        "numpy": lambda: np.ones(2),
        "slots": Slots,
        "bytearray": bytearray,
        "array": lambda: array.array("i"),
    }
    expect_exact(layout, count, lambda: {"state": new[kind]()})


@pytest.mark.parametrize(
    "state",
    [lambda: itertools.count(1), lambda: iter(range(1, 99)), lambda: (n for n in range(1, 99))],
)
def test_iterators_are_refused_in_stages_and_left_alone_by_replicas(
    state: Callable[[], Any],
) -> None:
    def advance(net: Any, h: Tensor) -> Tensor:
        return h * next(net.state)

    assert "the iterator state" in refusal(PIPE, advance, lambda: {"state": state()})
    expect_exact(DATA, advance, lambda: {"state": state()})


@pytest.mark.parametrize("drop", [True, False])
def test_tensors_that_move_within_a_list_are_refused_in_stages(drop: bool) -> None:
    def queue(net: Any, h: Tensor) -> Tensor:
        past = sum(net.past) if len(net.past) else 0.0
        net.past.append(h.detach().mean(0))
        if drop and len(net.past) > 2:
            net.past.pop(0)
        return h + past

    held = lambda: {"past": [] if drop else collections.deque(maxlen=2)}  # noqa: E731
    assert "moves a tensor that it has kept" in refusal(PIPE, queue, held, cut="last")
    expect_exact(DATA, queue, held)


@pytest.mark.parametrize("layout", [DATA, WIDTH, PIPE], ids=str)
def test_what_a_library_has_loaded_on_some_ranks_is_no_difference(layout: Layout) -> None:
    kind = Images if layout is WIDTH else Net
    data = [(x.double(), y.double()) for x, y in batches(kind)]

    def check(mesh: Mesh) -> None:
        loaded = {"backend": object()} if mesh.rank == 0 else {}

        def middle(_net: Any, h: Tensor) -> Tensor:
            loaded.setdefault("backend", object())
            return h

        train(made(kind, middle, dict), mesh, data)

    run_ranks(layout, check, plan=plan_for(layout))


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
def test_hooks_that_a_forward_installs_are_the_same_whatever_their_number(layout: Layout) -> None:
    def middle(net: Any, h: Tensor) -> Tensor:
        if not net.first._forward_hooks:
            net.first.register_forward_hook(_looks)
        return h

    data = [(x.double(), y.double()) for x, y in batches(Net)]

    def check(mesh: Mesh) -> None:
        for _ in range(1 + 3 * mesh.rank):
            nn.Identity().register_forward_hook(_looks)
        train(made(Net, middle, dict), mesh, data)

    run_ranks(layout, check, plan=plan_for(layout))


def _looks(_module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
    assert outputs.dim() == 2


# ---- losses


class Counting(nn.Module):
    """A loss that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(outputs, targets) * self.calls


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
def test_buffers_of_a_loss_are_the_same_on_all_ranks(layout: Layout) -> None:
    expect_exact(layout, lambda _net, h: h, criterion=Counting)


@pytest.mark.parametrize("layout", [DATA, WIDTH], ids=str)
def test_a_loss_may_change_the_outputs_in_place(layout: Layout) -> None:
    kind = Images if layout is WIDTH else Net
    double: Callable[[Tensor, Tensor], Tensor] = lambda y, t: F.mse_loss(y.mul_(2), t)  # noqa: E731
    expect_exact(layout, lambda _net, h: h, kind=kind, criterion=lambda: double)


def test_the_loss_of_stages_has_its_own_dtype() -> None:
    held = lambda: {"coarse": nn.Parameter(torch.ones(1))}  # noqa: E731

    def check(mesh: Mesh) -> torch.dtype:
        net = made(Net, lambda net, h: h * net.coarse.double(), held)
        net.coarse.data = net.coarse.data.bfloat16()
        x, y = (t.double() for t in batches(Net)[0])
        return parallelize(net, mesh, example=x, loss=nn.MSELoss()).step(x, y).dtype

    assert run_ranks(PIPE, check, plan=plan_for(PIPE)) == [torch.float64] * 2


def test_a_loss_within_the_net_keeps_its_weights_in_stages() -> None:
    def check(mesh: Mesh) -> float:
        net = made(Net, lambda _net, h: h, dict)
        net.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5, 0.3]).double())
        x, y = batches(Net)[0][0].double(), torch.tensor([0, 1, 2, 1, 0])
        expected = float(net.criterion(net(x), y).detach())
        model = parallelize(net, mesh, example=x, loss=net.criterion)
        return abs(float(model.step(x, y)) - expected)

    assert max(run_ranks(PIPE, check, plan=plan_for(PIPE))) < 1e-12


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
@pytest.mark.parametrize("old", ["size_average", "reduce"])
def test_the_old_words_for_reductions_of_functions(layout: Layout, old: str) -> None:
    loss = functools.partial(F.mse_loss, **{old: False})
    if old == "reduce":
        with pytest.raises(UsageError, match="gives no single number"):
            split_loss(loss)
        return
    expect_exact(layout, lambda _n, h: h, criterion=lambda: loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_are_broadcast_over_samples_are_refused(
    reduction: str, loss: Callable[..., Tensor]
) -> None:
    def check(mesh: Mesh) -> None:
        x, y = torch.randn(6, 5), torch.randn(6)
        criterion = functools.partial(loss, reduction=reduction)
        model = parallelize(nn.Linear(5, 1), mesh, example=x, loss=criterion)
        with pytest.raises(UsageError, match="broadcasts outputs of shape"):
            model.step(*model.shard(x, y))

    run_ranks(DATA, check)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss, nn.BCELoss])
def test_weights_of_samples_are_refused_where_samples_are_divided(loss: Any) -> None:
    def check(mesh: Mesh) -> None:
        x, y = torch.randn(6, 5), torch.rand(6, 3)
        net = nn.Sequential(nn.Linear(5, 3), nn.Sigmoid())
        model = parallelize(net, mesh, example=x, loss=loss(weight=torch.ones(6, 1)))
        with pytest.raises(UsageError, match=r"weight of shape \(6, 1\), one for every sample"):
            model.step(*model.shard(x, y))

    run_ranks(DATA, check)


def test_weights_of_classes_are_those_of_one_process() -> None:
    weight = torch.linspace(0.5, 1.5, 3).double()
    loss = nn.BCEWithLogitsLoss(weight=weight, pos_weight=weight.flip(0))
    expect_exact(DATA, lambda _n, h: h, criterion=lambda: loss)


def test_weights_of_pixels_are_refused_in_tiles() -> None:
    def check(mesh: Mesh) -> None:
        net = nn.Conv2d(2, 3, 3)
        x, y = torch.randn(3, 2, 7, 9), torch.rand(3, 3, 5, 7)
        loss = nn.BCEWithLogitsLoss(weight=torch.ones(5, 7))
        model = parallelize(net, mesh, example=x, loss=loss)
        with pytest.raises(UsageError, match=r"weight of shape \(5, 7\), one for every pixel"):
            model.step(*model.shard(x, y))

    run_ranks(WIDTH, check)


def one_element(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean().reshape(1)


@pytest.mark.parametrize("layout", [Layout(), DATA, PIPE], ids=["alone", "data", "pipe"])
def test_a_step_returns_a_scalar_whatever_the_shape_of_the_loss(layout: Layout) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=one_element)
        assert not model.step(*model.shard(x, y)).shape

    run_ranks(layout, check, plan=plan_for(layout))
