"""What a step trains besides parameters of the net: refused, as nobody would sum its gradients over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout
from joined import (
    CHECKED,
    DATA,
    PIPE,
    WIDTH,
    Images,
    Net,
    batches,
    expect_close,
    expect_exact,
    made,
)
from ranks import run_ranks
from sharding import on

pytestmark = CHECKED
LAYOUTS = [DATA, WIDTH, PIPE]
OUTSIDE = torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True)


def attribute() -> dict[str, Any]:
    return {"alpha": torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True)}


def listed() -> dict[str, Any]:
    return {"hidden": [nn.Conv2d(4, 4, 1).double()]}


def scaled(net: Any, x: Tensor) -> Tensor:
    return x * net.alpha


def in_list(net: Any, x: Tensor) -> Tensor:
    y = net.hidden[0](x)
    assert isinstance(y, Tensor)
    return y


def outside(_net: Any, x: Tensor) -> Tensor:
    return x * OUTSIDE


def unrecorded(net: Any, x: Tensor) -> Tensor:
    """A recording cannot follow it."""
    return scaled(net, x) if float(x.detach().sum()) == float(x.detach().sum()) else x


@pytest.mark.parametrize(
    ("middle", "held", "named"),
    [
        (scaled, attribute, "trains alpha, which is no parameter"),
        (in_list, listed, r"trains hidden\[0\]\.weight, which is no parameter|trains hidden"),
        (outside, dict, r"a tensor of shape \(4, 1, 1\) that no module holds"),
    ],
    ids=["attribute", "list", "outside"],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_no_module_holds_is_refused(
    layout: Layout, middle: Callable[..., Tensor], held: Callable[[], dict[str, Any]], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        expect_exact(layout, middle, held, Images)


def test_where_nothing_is_recorded_the_graph_tells() -> None:
    with pytest.raises(UsageError, match=r"trains a tensor of shape \(4, 1, 1\)"):
        expect_exact(DATA, unrecorded, attribute, Images)


def still(held: dict[str, Any]) -> dict[str, Any]:
    for value in held.values():
        (value if isinstance(value, Tensor) else value[0]).requires_grad_(False)
    return held


def taught(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.hidden[0](x)
    return x * y


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("middle", "held"),
    [
        (scaled, lambda: still(attribute())),
        (in_list, lambda: still(listed())),
        (taught, listed),
    ],
    ids=["attribute", "list", "teacher"],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_not_trained_may_lie_anywhere(
    layout: Layout, middle: Callable[..., Tensor], held: Callable[[], dict[str, Any]]
) -> None:
    state = {
        name: value if isinstance(value, Tensor) else value[0].state_dict()
        for name, value in held().items()
    }

    def equal() -> dict[str, Any]:
        found = held()
        for name, value in found.items():
            if not isinstance(value, Tensor):
                value[0].load_state_dict(state[name])
        return found

    expect_exact(layout, middle, equal, Images)


@pytest.mark.parametrize("layout", [DATA, WIDTH], ids=str)
@pytest.mark.parametrize("which", ["input", "target"])
def test_a_step_ends_where_its_batch_was_computed(which: str, layout: Layout) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Images)[0])
        net = made(Images, lambda _n, h: h, dict)
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        x, y = model.shard(x, y)
        delta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        with pytest.raises(UsageError, match="was computed with gradients"):
            model.step(x + delta if which == "input" else x, y if which == "input" else y + delta)

    run_ranks(layout, check)


def test_inputs_themselves_get_the_gradients_of_their_samples() -> None:
    x, y = (t.double() for t in batches(Net)[0])
    one = made(Net, lambda _n, h: h, dict)
    whole = x.clone().requires_grad_()
    F.mse_loss(one(whole), y).backward()
    assert whole.grad is not None
    expected = whole.grad

    def check(mesh: Mesh) -> None:
        model = parallelize(copy.deepcopy(one), mesh, loss=nn.MSELoss())
        mine, targets = model.shard(x, y)
        model.step(mine.requires_grad_(), targets)
        share = mesh.share(len(x))
        expect_close(mine.grad, expected[share.start : share.stop], "x.grad")

    run_ranks(DATA, check)


# ---- frozen, thawed and made in the forward


def thawing(net: Any, x: Tensor) -> Tensor:
    net.layer.requires_grad_(net.training and net.calls[0] % 3 > 0)
    net.calls[0] += 1
    y = net.layer(x)
    assert isinstance(y, Tensor)
    return y


def frozen() -> dict[str, Any]:
    return {"layer": nn.Conv2d(4, 4, 1), "calls": [0]}


def test_what_the_forward_thaws_is_summed() -> None:
    expect_exact(DATA, thawing, frozen, Images)


@pytest.mark.parametrize("layout", [WIDTH, PIPE], ids=str)
def test_recordings_freeze_nothing(layout: Layout) -> None:
    with pytest.raises(UsageError, match=r"freezes or thaws a parameter \(requires_grad\)"):
        expect_exact(layout, thawing, frozen, Images)


def growing(net: Any, x: Tensor) -> Tensor:
    net.calls[0] += 1
    if net.calls[0] > 1 and not hasattr(net, "gain"):
        net.gain = nn.Parameter(torch.ones(4, 1, 1, dtype=x.dtype))
    return x * net.gain if hasattr(net, "gain") else x


def test_what_the_forward_makes_is_summed() -> None:
    expect_exact(DATA, growing, lambda: {"calls": [0]}, Images)


# ---- outside of steps


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_gradients_that_pass_two_models_are_weighed_once(rows: int) -> None:
    torch.manual_seed(6)
    first, second = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
    x, y = torch.randn(rows, 5).double(), torch.randn(rows, 3).double()
    F.mse_loss(second(first(x).tanh()), y).backward()
    wanted = [p.grad for net in (first, second) for p in net.parameters()]
    for net in (first, second):
        net.zero_grad()

    def check(mesh: Mesh) -> None:
        one, other = (parallelize(copy.deepcopy(net), mesh) for net in (first, second))
        mine, targets = one.shard(x, y)
        outputs = other(one(mine).tanh())
        # The mean over no samples is not a number.
        (F.mse_loss(outputs, targets) if len(mine) else outputs.sum()).backward()
        found = [p.grad for model in (one, other) for p in model.parameters()]
        for got, expected in zip(found, wanted, strict=True):
            expect_close(got, expected, "a gradient")

    run_ranks(2, check)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_numbers_of_parts_are_refused(shard: str) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        net = made(Net, lambda _n, h: h, dict)
        model = parallelize(net, mesh, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        gradient: Any = next(iter(model.parameters())).grad
        whole = gradient.full_tensor()
        numbers: list[Callable[[Any], Any]] = [
            lambda g: g.norm().item(),
            lambda g: float(g.abs().max()),
            lambda g: bool(torch.isnan(g).any()),
            lambda g: bool(torch.isfinite(g).all()),
        ]
        refused = 0
        for number in numbers:
            try:
                found = number(gradient)
            except UsageError:
                refused += 1
            else:  # torch gathers some by itself: that of `all` from 2.15 on
                assert found == pytest.approx(number(whole))
        assert refused > 1
        assert gradient.norm().full_tensor().item() == pytest.approx(whole.norm().item())
        assert bool(gradient.norm() > 0)  # a comparison gathers

    on(shard, 2, check)


class Noted(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"noted": 1}


def test_states_of_stages_have_what_modules_add() -> None:
    def check(mesh: Mesh) -> None:
        x, y = batches(Net)[0]
        net = nn.Sequential(Noted(5, 4), nn.Tanh(), nn.Linear(4, 3))
        keys = list(net.state_dict())
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        assert list(model.full_state_dict()) == keys
        net.register_buffer("late", torch.ones(2))
        state = model.full_state_dict()
        assert state["0._extra_state"] == {"noted": 1}
        assert torch.equal(state["late"], torch.ones(2))

    run_ranks(PIPE, check)
