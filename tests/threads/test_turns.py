"""Tiles that one process computes by turns, against one process that computes images whole.

Every rule is tested by turns where it is tested in tiles, see `expect_tiles`; here are whole models, and
turns beside replicas, tile ranks, budgets and what users do.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize
from fivefold.parallel.memory.file import FileStore
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.program.weightless import Count
from fivefold.parallel.turns import net as turned_net
from fivefold.parallel.turns import shelf, step
from fivefold.parallel.turns.net import TurnedNet
from fivefold.parallel.turns.step import Step
from fivefold.plan import Layout, Memory, Parallel, Plan, Tiles
from fivefold.sections import bytes_of
from ranks import run_ranks
from small_models import CLASSES, SMALL, batch_of, judged, loss_of, net_of

ONE = Layout()


def plan_of(turns: str, layout: Layout = ONE, **memory: Any) -> Plan:
    return Plan(layout=layout, tiles=Tiles(strict=True, turns=turns), memory=Memory(**memory))


def expect_exact(name: str, plan: Plan, steps: int = 2) -> None:
    report = judged(net_of(name), plan, steps, loss_of(name), lambda: batch_of(name))
    assert report.passed, (report.verdict(), report.notes, report.worst)


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


# ---- under a budget


DEEP = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
    nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1),
)  # fmt: skip


def test_what_does_not_fit_is_on_a_disk_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_away: list[int] = []
    before = shelf.Shelf.put_away_item

    def counted(self: Any, item: Any) -> None:
        put_away.append(item.size_bytes)
        before(self, item)

    monkeypatch.setattr(shelf, "_LEAST_BYTES", 1)
    monkeypatch.setattr(shelf.Shelf, "put_away_item", counted)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(1, 3, 128, 96), torch.randn(1, 3, 128, 96)

    plan = plan_of("height=4,width=2", budget="2400KiB", disk=str(tmp_path))
    report = judged(copy.deepcopy(DEEP), plan, 2, nn.MSELoss(), batch)
    assert report.passed, (report.verdict(), report.notes, report.worst)
    assert sum(put_away) > 1 << 20


@pytest.mark.parametrize("whole", [False, True], ids=["again", "whole"])
@pytest.mark.parametrize("window_bytes", [0, 100_000])
@pytest.mark.parametrize("name", ["unet", pytest.param("resnet20", marks=pytest.mark.long)])
def test_everything_may_be_put_away(
    name: str, window_bytes: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(FileStore(tmp_path), window_bytes)

    def nothing_stays(_self: Any, programs: Any, batch: Any, state: Any) -> Any:
        found = shelf.Shelf(1, pool, (*batch, *state.values()))
        numbers = frozenset(range(99 if whole else 0))
        return found, [numbers] * len(programs)

    monkeypatch.setattr(shelf, "_LEAST_BYTES", 1)
    monkeypatch.setattr(TurnedNet, "_shelf", nothing_stays)
    expect_exact(name, plan_of("height=2,width=2"))
    assert pool.store.rates.bytes[0] > 1 << 20
    pool.close()


def test_outputs_stay_while_values_are_put_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "_LEAST_BYTES", 1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 24, 1))
    net, x = net.double(), torch.randn(1, 3, 128, 96, dtype=torch.float64)
    want = copy.deepcopy(net)(x).detach()
    plan = plan_of("height=4,width=2", budget="2000KiB", disk=str(tmp_path))

    def made(mesh: Mesh) -> Tensor:
        return parallelize(net, mesh)(x)

    torch.testing.assert_close(run_ranks(1, made, plan=plan)[0], want)


def test_without_gradients_what_was_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, most = list[weakref.ref[Tensor]](), 0
    keep, put_away = shelf.Shelf.keep, shelf.Shelf.put_away

    def noted(self: shelf.Shelf, tensor: Tensor) -> Tensor:
        kept.append(weakref.ref(found := keep(self, tensor)))
        return found

    def counted(self: shelf.Shelf) -> None:
        nonlocal most
        put_away(self)
        most = max(most, sum(one.nbytes for ref in kept if (one := ref()) is not None))

    monkeypatch.setattr(shelf.Shelf, "keep", noted)
    monkeypatch.setattr(shelf.Shelf, "put_away", counted)
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(6)]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *(m for layer in layers for m in layer)).double()
    x = torch.randn(1, 3, 64, 48, dtype=torch.float64)
    want, layer = copy.deepcopy(net)(x).detach(), 8 * 64 * 48 * 8

    def made(mesh: Mesh) -> Tensor:
        return parallelize(net, mesh)(x)

    plan = Plan(tiles=Tiles(strict=True, fuse="never", turns="height=4,width=2"))
    torch.testing.assert_close(run_ranks(1, made, plan=plan)[0], want)
    assert most < 2.2 * layer, "a layer of all turns, and the next one of some"


@pytest.mark.parametrize(
    ("budget", "says"),
    [("200KiB", "and a turn takes up to"), ("2MiB", "Name a local disk")],
)
def test_too_little_is_refused(budget: str, says: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 3, padding=1)
    )
    refused(net, plan_of("height=4", budget=budget), says, (1, 3, 128, 96))


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize(
    ("budget", "again"), [("4800KiB", (28, 32)), ("7200KiB", (17, 31)), ("18MiB", (16, 16))]
)
def test_what_a_budget_has_room_for_is_not_computed_again(
    budget: str, again: tuple[int, int], disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, run_steps, train = copy.deepcopy(DEEP).double(), step.run_steps, Step.train
    computed, peak, like = 0, 0, torch.empty(1, 3, 128, 96, dtype=torch.float64)
    batches = [(torch.randn_like(like), torch.randn_like(like)) for _ in range(2)]

    def counted(program: Any, values: Any, steps: Any, wanted: set[int], *rest: Any) -> Any:
        nonlocal computed
        computed += len(wanted) > 0  # not a head, which gives nothing
        return run_steps(program, values, steps, wanted, *rest)

    def watched(self: Step, *args: Any, **options: Any) -> Any:  # not the recording before
        nonlocal computed, peak
        computed = 0
        with Count([], "cpu") as count:  # images and targets are found as they are viewed
            found = train(self, *args, **options)
        peak = max(peak, count.most())
        return found

    def trained(mesh: Mesh) -> list[Tensor]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        for batch in batches:
            model.step(*batch)
        return [p.grad for p in model.parameters() if p.grad is not None]

    monkeypatch.setattr(step, "run_steps", counted)
    monkeypatch.setattr(Step, "train", watched)
    plan = plan_of("height=4,width=2", budget=budget, disk=str(tmp_path) if disk else "")
    grads = run_ranks(1, trained, plan=plan)[0]
    for x, y in batches:
        nn.functional.mse_loss(net(x), y).backward()
    torch.testing.assert_close(grads, [p.grad for p in net.parameters()])
    assert again[0] <= computed <= again[1], "two segments of eight turns"
    assert peak <= bytes_of(budget)


def test_what_heads_have_asked_keeps_no_turn_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, dropped, most = shelf.Shelf.drop, list["weakref.ref[Tensor]"](), 0
    blocks = [[nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(3)]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *(m for block in blocks for m in block)).double()
    batch = torch.randn(1, 3, 128, 128).double(), torch.randn(1, 8, 128, 128).double()

    def noted(self: shelf.Shelf, tensors: Any) -> None:
        nonlocal most
        tensors = [*tensors]
        most = max(most, sum(one() is not None for one in dropped))
        drop(self, tensors)
        dropped.extend(map(weakref.ref, tensors))

    def trained(mesh: Mesh) -> None:
        parallelize(net, mesh, loss=nn.MSELoss()).step(*batch)

    monkeypatch.setattr(shelf.Shelf, "drop", noted)
    plan = plan_of("height=4,width=4", budget="8MiB", disk=str(tmp_path))
    run_ranks(1, trained, plan=plan)
    assert len(dropped) > 3 * 16 * 2, "values of each turn and segment, and their gradients"
    assert most < 6, "of 16 turns, each of which has dropped what it had"


@pytest.mark.parametrize(("budget", "plenty"), [("12MiB", False), ("40MiB", True), ("", True)])
def test_more_layers_share_an_exchange_where_memory_is_scarce(
    budget: str, plenty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, numbers = Step.__init__, set[int]()

    def noted(self: Step, turns: Any, *rest: Any) -> None:
        numbers.add(len(turns[0].segments))
        made(self, turns, *rest)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(1, 3, 128, 96), torch.randn(1, 3, 128, 96)

    monkeypatch.setattr(Step, "__init__", noted)
    monkeypatch.setattr(turned_net, "measured_processor", lambda _: (1e9, 1e10))
    layers = [nn.Conv2d(24, 24, 3, padding=1) for _ in range(5)]
    net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *layers, nn.Conv2d(24, 3, 3, padding=1))
    disk = str(tmp_path) if budget else ""
    plan = plan_of("height=4,width=2", budget=budget, disk=disk)
    report = judged(net, plan, 2, nn.MSELoss(), batch)
    assert report.passed, (report.verdict(), report.notes, report.worst)
    assert max(numbers) == 6 if plenty else max(numbers) < 6


# ---- as few as a budget allows


@pytest.mark.parametrize("layout", [ONE, Layout(data=2), Layout(height=2)], ids=str)
@pytest.mark.parametrize("budget", ["20MiB", "2600KiB"])
def test_as_few_as_fit_are_exact(budget: str, layout: Layout, tmp_path: Path) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, 125, 99), torch.randn(2, 3, 125, 99)

    plan = plan_of("auto", layout, budget=budget, disk=str(tmp_path))
    report = judged(copy.deepcopy(DEEP), plan, 2, nn.MSELoss(), batch)
    assert report.passed, (report.verdict(), report.notes, report.worst)


def test_each_size_has_its_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, numbers = Step.__init__, list[int]()

    def noted(self: Step, turns: Any, *rest: Any) -> None:
        numbers.append(len(turns))
        made(self, turns, *rest)

    monkeypatch.setattr(Step, "__init__", noted)
    net, sizes = copy.deepcopy(DEEP).double(), [(64, 48), (257, 99), (65, 48), (300, 410), (64, 48)]
    batches = [
        (torch.randn(1, 3, *one).double(), torch.randn(1, 3, *one).double()) for one in sizes
    ]

    def trained(mesh: Mesh) -> list[Tensor]:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        losses = [model.step(*batch) for batch in batches]
        model.eval()
        model(batches[3][0])
        return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]

    plan = plan_of("auto", budget="10MiB", disk=str(tmp_path))
    found = run_ranks(1, trained, plan=plan)[0]
    losses = [nn.functional.mse_loss(net(x), y) for x, y in batches]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(found[:5], [one.detach() for one in losses])
    torch.testing.assert_close(found[5:], [p.grad for p in net.parameters()])
    first, second, third, fourth, again, evaluated = numbers
    assert first == third == again == 1 < second < fourth
    assert 1 < evaluated <= fourth


@pytest.mark.parametrize(
    ("memory", "problem", "says"),
    [
        ({}, PlanError, "as few as memory.budget allows: set one"),
        ({"budget": "400KiB"}, UsageError, "memory.budget = 400KiB is too little"),
    ],
)
def test_open_numbers_are_refused(
    memory: dict[str, Any], problem: type[Exception], says: str
) -> None:
    def trained(mesh: Mesh) -> None:
        model = parallelize(copy.deepcopy(DEEP), mesh, loss=nn.MSELoss())
        model.step(torch.randn(1, 3, 64, 64), torch.randn(1, 3, 64, 64))

    with pytest.raises(problem, match=says):
        run_ranks(1, trained, plan=plan_of("auto", **memory))


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


def refused(net: nn.Module, plan: Plan, says: str, shape: tuple[int, ...] = (2, 3, 15, 13)) -> None:
    def check(mesh: Mesh) -> None:
        model = parallelize(net.double(), mesh, loss=nn.MSELoss())
        x = torch.randn(*shape, dtype=torch.float64)
        with torch.no_grad():
            y = copy.deepcopy(net)(x)
        with pytest.raises((UsageError, PlanError), match=says):
            model.step(x, y)

    run_ranks(plan.layout, check, plan=plan)


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
