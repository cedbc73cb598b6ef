"""Tiles that one process computes by turns, against one process that computes images whole.

Every rule is tested by turns where it is tested in tiles, see `expect_tiles`; here are whole models, and
turns beside replicas, tile ranks and what users do. Budgets are in `test_turns_budget`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize
from fivefold.plan import Layout, Memory, Parallel, Plan, Tiles
from ranks import run_ranks
from small_models import CLASSES, SMALL, batch_of, judged, loss_of, net_of
from turned import expect_exact, plan_of, refused


@pytest.mark.long(every=4)
@pytest.mark.parametrize("turns", ["height=2", "height=2,width=3"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "unet3d"])
def test_models(name: str, turns: str) -> None:
    expect_exact(name, plan_of(turns))


@pytest.mark.parametrize("turns", ["depth=3", "depth=2,height=2,width=2"])
def test_volumes(turns: str) -> None:
    expect_exact("unet3d", plan_of(turns))


@pytest.mark.long(every=4)
@pytest.mark.parametrize(
    ("name", "layout", "turns"),
    [
        ("resnet20", Layout(data=2), "height=2,width=2"),
        ("unet", Layout(height=2), "height=2"),  # both along the same axis
        ("edsr", Layout(width=2), "height=3"),
        ("shufflenet_v2_x1_0", Layout(height=2), "width=2"),
        ("resnet20", Layout(data=2, width=2), "height=2,width=2"),
        ("unet3d", Layout(depth=2), "depth=2,width=2"),
    ],
    ids=str,
)
def test_beside_ranks(name: str, layout: Layout, turns: str) -> None:
    expect_exact(name, plan_of(turns, layout))


@pytest.mark.parametrize("name", ["resnet20", "edsr"])
def test_a_replica_without_samples(name: str) -> None:
    plan = plan_of("height=2,width=2", Layout(data=2))
    report = judged(net_of(name), plan, 2, loss_of(name), lambda: batch_of(name, 1))
    assert report.passed, (report.verdict(), report.notes, report.worst)


@pytest.mark.parametrize("fuse", ["never", "100"])
def test_however_many_layers_share_an_exchange(fuse: str) -> None:
    plan = Plan(tiles=Tiles(strict=True, fuse=fuse, turns="height=2,width=2"))
    expect_exact("edsr", plan)


# ---- what users do


def by_turns(
    net: nn.Module, work: Callable[[ParallelModel], Any], loss: Any, turns: str = "height=2,width=2"
) -> Any:
    def check(mesh: Mesh) -> Any:
        return work(parallelize(net, mesh, loss=loss))

    return run_ranks(1, check, plan=plan_of(turns))[0]


class Head(nn.Module):
    """Logits of an image, and of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh())
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


X = torch.randn(2, 3, 15, 13, dtype=torch.float64)
Y = torch.randint(0, CLASSES, (2, 15, 13))


def test_gradients_accumulate_and_hooks_see_them_once() -> None:
    net = Head().double()
    plain, seen = copy.deepcopy(net), list[Tensor]()
    loss = nn.CrossEntropyLoss()

    def see(grad: Tensor) -> None:
        seen.append(grad.clone())

    net.head.weight.register_hook(see)

    def work(model: ParallelModel) -> None:
        for _ in range(2):
            model.step(X, Y)

    by_turns(net, work, loss)
    for _ in range(2):
        loss(plain(X), Y).backward()
    for (name, have), (_, want) in zip(
        net.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(have.grad, want.grad, msg=name, rtol=1e-9, atol=1e-12)
    assert len(seen) == 2
    torch.testing.assert_close(sum(seen), plain.head.weight.grad)


def test_a_gradient_of_the_input() -> None:
    net, x = Head().double(), X.clone().requires_grad_()
    plain, own = copy.deepcopy(net), X.clone().requires_grad_()
    loss = nn.CrossEntropyLoss()
    by_turns(net, lambda model: model.step(x, Y), loss)
    loss(plain(own), Y).backward()
    torch.testing.assert_close(x.grad, own.grad)


def test_frozen_parameters_stay_so() -> None:
    net = Head().double()
    net.body.requires_grad_(False)
    plain = copy.deepcopy(net)
    loss = nn.CrossEntropyLoss()
    by_turns(net, lambda model: model.step(X, Y), loss)
    loss(plain(X), Y).backward()
    assert net.body[0].weight.grad is None
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)


def test_outputs_are_whole() -> None:
    net, found = Head().double(), list[Tensor]()
    plain = copy.deepcopy(net)

    def work(model: ParallelModel) -> tuple[Tensor, Tensor]:
        model.on_outputs = found.append
        model.step(X, Y)
        model.eval()
        sums = model.evaluate(X, Y, lambda out, _: out.sum().double().reshape(1))
        return model(X), sums

    made, sums = by_turns(net, work, nn.CrossEntropyLoss())
    torch.testing.assert_close(found[0], plain(X).detach())
    want = plain.eval()(X).detach()
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(sums, want.sum().reshape(1))


def test_a_scaled_step() -> None:
    net = Head().double()
    plain = copy.deepcopy(net)
    loss = nn.CrossEntropyLoss()

    class Scaler:
        def scale(self, value: Tensor) -> Tensor:
            return value * 4

    told = by_turns(net, lambda model: model.step(X, Y, Scaler()), loss)
    want = loss(plain(X), Y)
    (want * 4).backward()
    torch.testing.assert_close(told, want.detach())
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)


def test_masks_are_the_same_however_many_turns() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(8, 2, 1)).double()
    y = torch.randn(2, 2, 15, 13, dtype=torch.float64)
    found: list[Tensor] = []
    for turns in ("height=2", "height=3,width=2"):
        own = copy.deepcopy(net)
        by_turns(own, lambda model: model.step(X, y), nn.MSELoss(), turns)
        grad = next(own.parameters()).grad
        assert grad is not None
        found.append(grad)
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
def test_a_loss_that_sees_whole_images() -> None:
    net = Head().double()
    plain = copy.deepcopy(net)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        picked = outputs.softmax(1).gather(1, targets[:, None])
        return 1 - picked.sum() / picked.square().sum()

    told = by_turns(net, lambda model: model.step(X, Y), loss)
    want = loss(plain(X), Y)
    want.backward()
    torch.testing.assert_close(told, want.detach())
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)
    torch.testing.assert_close(net.body[0].weight.grad, plain.body[0].weight.grad)


# ---- refusals


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.conv(x)
        return self.conv(x) * 2


class Counts(nn.Module):
    """Computes something else in every forward, and leaves a list where there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, CLASSES, 3, padding=1), nn.BatchNorm2d(CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = [*getattr(self, "seen", ()), self.calls]
        return self.norm(self.conv(x)) * sum(self.seen)


def test_numbers_that_a_forward_leaves_are_left_once() -> None:
    torch.manual_seed(1)
    net = Counts().double()
    plain, y = copy.deepcopy(net), torch.randn(2, CLASSES, 15, 13, dtype=torch.float64)

    def work(model: ParallelModel) -> None:
        for _ in range(3):
            model.step(X, y)
            nn.functional.l1_loss(plain(X), y).backward()
            found = model.module
            assert isinstance(found, Counts)
            assert (found.calls, found.seen) == (plain.calls, plain.seen)
            for one, other in zip(found.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                assert torch.allclose(one.grad, other.grad, rtol=1e-10)
        with torch.no_grad():
            assert torch.allclose(model.eval()(X), plain.eval()(X), rtol=1e-10)

    by_turns(net, work, nn.L1Loss())


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].flip(-1).cumsum(-1).flip(-1)


class WithOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(self.conv(x))  # pyright: ignore[reportReturnType]


@pytest.mark.filterwarnings("ignore:.* is not known to Fivefold's tiles")
@pytest.mark.parametrize(
    ("net", "says"),
    [(Leaves(), "leaves tensors behind"), (WithOwn(), "fivefold.pointwise")],
    ids=["leaves", "own function"],
)
def test_what_turns_cannot_do_is_told(net: nn.Module, says: str) -> None:
    refused(net, Plan(tiles=Tiles(turns="height=2")), says)


def test_images_smaller_than_turns_are_refused() -> None:
    refused(Head(), plan_of("height=16"), "too few for height=16", (2, 3, 15, 13))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tiles=Tiles(turns="height=2"), memory=Memory(recompute="auto")),
        Plan(tiles=Tiles(turns="height=2"), parallel=Parallel(compile=True)),
        Plan(tiles=Tiles(turns="height=2"), parallel=Parallel(batch_norm="replica")),
        Plan(
            layout=Layout(data=2), tiles=Tiles(turns="height=2"), memory=Memory(shard="optimizer")
        ),
        Plan(layout=Layout(pipe=2), tiles=Tiles(turns="height=2")),
    ],
    ids=["recompute", "compile", "batch norm", "shard", "pipe"],
)
def test_plans_with_which_turns_do_not_go(plan: Plan) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(PlanError, match=r"tiles\.turns = 'height=2' does not go with"):
            parallelize(Head(), mesh, example=torch.zeros(4, 3, 15, 13), loss=nn.MSELoss())

    run_ranks(plan.layout, check, plan=plan)


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ("data=2", "data, which is no tile axis: use depth, height, width"),
        ("widht=2", "did you mean 'width'"),
        ("height", "is not AXIS=NUMBER"),
    ],
)
def test_turns_that_mean_nothing(turns: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Tiles(turns=turns)


class Counting(nn.Module):
    """A loss whose weight grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (outputs - targets).abs().mean() * self.calls


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.mean += outputs.detach().mean()
        return (outputs - targets - self.mean).abs().mean()


@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
@pytest.mark.parametrize(
    ("loss", "says"), [(Counting(), "changes its calls"), (Remembering(), "changes its mean")],
    ids=["a counter", "a buffer"],
)  # fmt: skip
def test_a_loss_that_changes_as_it_is_called_is_refused(loss: nn.Module, says: str) -> None:
    def work(model: ParallelModel) -> None:
        with pytest.raises(UsageError, match=says):
            model.step(X, torch.randn(2, CLASSES, 15, 13, dtype=torch.float64))

    by_turns(Head().double(), work, loss)


class Reads(nn.Module):
    """Statistics that it has just updated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        assert self.norm.running_mean is not None
        return y + self.norm.running_mean[:, None, None]


def test_statistics_that_are_read_in_the_same_forward_are_refused() -> None:
    refused(Reads(), plan_of("height=2"), "reads running statistics|leaves tensors behind")


def test_training_and_evaluation_take_turns() -> None:
    """Heads ask more questions where there are gradients."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).amax((2, 3))

    net, y = Largest().double(), torch.randn(2, 4, dtype=torch.float64)
    plain = copy.deepcopy(net)

    def work(model: ParallelModel) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(2):
            model.train()
            found.append(model.step(X, y))
            model.eval()
            with torch.no_grad():
                found.append(model(X))
        return found

    loss = nn.MSELoss()
    first, out, second, again = by_turns(net, work, loss)
    want = plain(X)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(again, want.detach())
    torch.testing.assert_close(first, loss(want, y).detach())
    torch.testing.assert_close(second, first)
    for _ in range(2):
        loss(plain(X), y).backward()
    torch.testing.assert_close(net.conv.weight.grad, plain.conv.weight.grad)
