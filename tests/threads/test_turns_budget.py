"""Turns under a memory budget: what they put away, keep and compute again, and how many there are."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.parallel.memory.file import FileStore
from fivefold.parallel.memory.link import measured_link
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.program.weightless import Count
from fivefold.parallel.turns import budget as turned_budget
from fivefold.parallel.turns import net as turned_net
from fivefold.parallel.turns import shelf, step
from fivefold.parallel.turns.net import TurnedNet
from fivefold.parallel.turns.step import Step
from fivefold.plan import Layout, Plan, Tiles
from fivefold.sections import bytes_of
from ranks import run_ranks
from small_models import judged
from turned import ONE, expect_exact, plan_of, refused

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
    # A processor and a disk as they may be: what is right here goes by their rates.
    monkeypatch.setattr(turned_net, "measured_processor", lambda _: (1e9, 1e10))
    monkeypatch.setattr(
        turned_budget, "measured_link",
        lambda *of: replace(measured_link(*of), out_bytes_per_s=1e8),
    )  # fmt: skip
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
