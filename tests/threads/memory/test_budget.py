"""Steps under a memory budget: the same numbers whatever is chosen, and no more held than was allowed."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh, owned
from fivefold.parallel import ParallelModel
from fivefold.parallel.memory import saving, step
from fivefold.plan import Layout, Plan, Provenance
from fuzz.choices import drawn
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "tiles"))

from live import Live

LAYOUTS = [
    Layout(), Layout(data=2), Layout(width=2), Layout(data=2, height=2), Layout(pipe=2),
    Layout(pipe=2, width=2), Layout(data=3),
]  # fmt: skip


class Net(nn.Module):
    """With what a segment could get wrong: norms, changes in place, branches, several values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1)
            )
            for _ in range(3)
        )  # fmt: skip
        self.pool, self.act = nn.MaxPool2d(2, 2), nn.GELU()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x)))
        for block in self.blocks:
            x = torch.relu_(block(x) + x)
        a, b = self.pool(x).chunk(2, 1)
        x = torch.cat([a * b, torch.sigmoid(b)], 1)
        return self.head(x.mean((2, 3)))


def batches() -> list[tuple[Tensor, Tensor]]:
    """The last two are of another size than the first, so that choices are made anew."""
    made: list[tuple[Tensor, Tensor]] = []
    for number, (rows, height, width) in enumerate(
        [(6, 9, 11), (6, 9, 11), (6, 9, 11), (5, 8, 7), (6, 9, 11)]
    ):
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(rows, 3, height, width, generator=draw, dtype=torch.float64)
        made.append((x, torch.randint(0, 5, (rows,), generator=draw)))
    return made


def plain(net: nn.Module, pieces: int = 1) -> list[dict[str, Tensor]]:
    """One process, without Fivefold: gradients and buffers by step; a batch in micro-batches."""
    net, found = copy.deepcopy(net), list[dict[str, Tensor]]()
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optim.zero_grad()
        for piece in range(pieces):
            rows = owned(len(y), pieces, piece)
            part, target = x[rows.start : rows.stop], y[rows.start : rows.stop]
            (nn.functional.cross_entropy(net(part), target, reduction="sum") / len(y)).backward()
        found.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        found[-1] |= {n: b.clone() for n, b in net.named_buffers()}
        optim.step()
    return found


def under(net: nn.Module) -> Callable[[Mesh], list[dict[str, Tensor]]]:
    def check(mesh: Mesh) -> list[dict[str, Tensor]]:
        own, found = copy.deepcopy(net), list[dict[str, Tensor]]()
        model = ff.parallelize(own, mesh, example=batches()[0][0], loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in batches():
            optim.zero_grad()
            model.step(*model.shard(x, y))
            found.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            found[-1] |= {n: b.clone() for n, b in model.named_buffers()}
            optim.step()
        return found

    return check


def budget_of(layout: Layout, budget: str, disk: Path, shard: str = "none") -> Plan:
    """Two runs of it give the same bits: nothing but what the budget chooses goes by measured times."""
    words: dict[str, Any] = {"memory.budget": budget, "memory.disk": str(disk), "tiles.fuse": "2"}
    words["memory.shard"] = shard
    if layout.pipe > 1:
        words |= {"pipeline.micro_batches": 2, "pipeline.schedule": "1f1b"}
    return Plan(layout=layout).replace(words, Provenance())


@pytest.mark.long(every=3)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_choice_changes_a_number(
    layout: Layout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(self: step.StepBudget, decision: step.Decision, _: Any) -> None:
        rng, decision.due = random.Random(f"{seed} {self.rank} {decision.steps}"), False
        decision.choice = drawn(rng, len(decision.profile.nodes))
        decision.pool = self.pool(rng.choice([0, 500, 1 << 20]))

    monkeypatch.setattr(step.StepBudget, "choose", choose)
    monkeypatch.setattr(saving, "LEAST_BYTES", 1)
    torch.manual_seed(1)
    net = Net().double()
    expected = plain(net, pieces=2 if layout.pipe > 1 else 1)
    made = run_ranks(layout, under(net), plan=budget_of(layout, "1TiB", Path.cwd()))
    for number, right in enumerate(expected):
        held: set[str] = set()
        for rank in made:
            for name, value in rank[number].items():
                torch.testing.assert_close(value, right[name], rtol=1e-10, atol=1e-11, msg=name)
                held.add(name)
        assert held == right.keys()


def accumulated(net: nn.Module, seed: int | None) -> Callable[[Mesh], list[Tensor]]:
    """Gradients of two steps each, in bfloat16 where autocast says so, scaled."""

    def choose(self: step.StepBudget, decision: step.Decision, _: Any) -> None:
        decision.due = False
        if seed is not None:
            rng = random.Random(f"{seed} {self.rank} {decision.steps}")
            decision.choice = drawn(rng, len(decision.profile.nodes))
            decision.pool = self.pool(rng.choice([0, 500, 1 << 20]))

    def check(mesh: Mesh) -> list[Tensor]:
        own, found = copy.deepcopy(net), list[Tensor]()
        x, y = batches()[0]
        model = ff.parallelize(own, mesh, example=x.float(), loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler, batch = torch.amp.GradScaler("cpu"), model.shard(x.float(), y)
        for _ in range(4):
            optim.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    model.step(*batch, scaler)
            scaler.unscale_(optim)
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            scaler.step(optim)
            scaler.update()
        return found

    check.choose = choose  # type: ignore[attr-defined]
    return check


@pytest.mark.parametrize("layout", [LAYOUTS[0], *LAYOUTS[2:6:2]], ids=str)
def test_bits_stay_with_autocast_scalers_and_accumulation(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LEAST_BYTES", 1)
    torch.manual_seed(2)
    net, made = Net(), list[list[list[Tensor]]]()
    for seed in (None, 5):
        check: Any = accumulated(net, seed)
        monkeypatch.setattr(step.StepBudget, "choose", check.choose)
        made.append(run_ranks(layout, check, plan=budget_of(layout, "1TiB", Path.cwd())))
    for one, other in zip(*made, strict=True):
        assert len(one) == len(other) > 0
        assert all(map(torch.equal, one, other))


class Deep(nn.Module):
    """Large enough for a budget to have a choice, quick enough for a test."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for n in (3, *(8,) * (blocks - 1))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean((2, 3))


def images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 64, 64, generator=draw), torch.randn(4, 8, generator=draw)


def measured(layout: Layout, budget: str, steps: int = 4, host: str = "") -> list[tuple[Any, ...]]:
    """By rank: what was told, and the most that was alive in each step, without what existed before."""
    net = Deep()

    def check(mesh: Mesh) -> tuple[Any, ...]:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=images()[0], loss=nn.MSELoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        batch, peaks = model.shard(*images()), list[int]()
        told = model.memory(*batch)
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            model.step(*batch)  # decided, where it is
            with Live() as live:
                model.step(*batch)
            peaks.append(live.peak_bytes)
            optim.step()
        return told, peaks, model.memory(*batch)

    plan = budget_of(layout, budget, Path.cwd()).replace({"memory.host": host}, Provenance())
    return run_ranks(layout, check, plan=plan, timeout_s=200)  # threads decide in turn


@pytest.mark.timeout(500)
@pytest.mark.long(every=8)
@pytest.mark.parametrize("part", [0.7, 0.45])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(width=2), Layout(data=2), Layout(pipe=2)], ids=str
)
def test_no_more_is_held_than_allowed(layout: Layout, part: float) -> None:
    ((free, _, _), *_) = measured(layout, "1TiB", 0)
    assert "kept" in str(free) and "computed again" not in str(free)
    part_bytes = int(part * free.peak_bytes)
    # At first room is left for what an optimiser may keep; this one keeps nothing.
    limit = free.total_bytes - free.peak_bytes + part_bytes + 2 * free.trained_bytes
    for told, peaks, last in measured(layout, f"{limit}B"):
        standing = told.total_bytes - told.peak_bytes
        assert told.peak_bytes <= limit - standing - 2 * told.trained_bytes
        allowed = limit - standing
        assert max(peaks[3:]) <= allowed  # before, the net is recorded again, with stand-ins
        assert last.peak_bytes <= allowed
        assert "computed again" in str(last) or "MiB before it begins" in str(last)


def test_a_later_search_that_finds_nothing_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other times it takes another way, which may lead nowhere."""
    ((free, _, _),) = measured(Layout(), "1TiB", 0)
    limit = free.total_bytes - free.peak_bytes // 2 + 2 * free.trained_bytes
    searched, choose, tried = step.decided, step.StepBudget.choose, list[int]()

    def decided(simulator: Any, limit_bytes: int, near: Any = None) -> Any:
        return searched(simulator, limit_bytes, near) if not tried[-1] else None

    def chosen(self: Any, decision: Any, rehearsed: Any) -> None:
        tried.append(decision.steps)
        choose(self, decision, rehearsed)

    monkeypatch.setattr(step, "decided", decided)
    monkeypatch.setattr(step, "least", lambda simulator: [simulator.start()])
    monkeypatch.setattr(step.StepBudget, "choose", chosen)
    ((_, peaks, last),) = measured(Layout(), f"{limit}B")
    assert len(tried) > 1
    assert max(peaks[3:]) <= last.peak_bytes < free.peak_bytes


def test_choices_keep_to_the_room_that_there_is() -> None:
    """The store refuses more, in the middle of a step."""
    ((free, _, _),) = measured(Layout(), "1TiB", 0)
    limit = free.total_bytes - int(0.4 * free.peak_bytes)
    ((_, peaks, last),) = measured(Layout(), f"{limit}B", host="1MiB")
    assert "; there is room to spill 0.9 MiB" in str(last)
    assert max(peaks[3:]) < free.peak_bytes
    with pytest.raises(
        UsageError, match=r"is too little: .* MiB, with room to spill 1 MiB, of which"
    ):
        measured(Layout(), "1MiB", 1, host="1MiB")


def test_too_little_is_refused_with_the_least_that_works() -> None:
    (free,) = measured(Layout(), "1TiB", 0)
    with pytest.raises(
        UsageError, match=r"memory\.budget = 1MiB is too little: a step holds at least"
    ):
        measured(Layout(), "1MiB", 1)
    with pytest.raises(UsageError, match=r"is too little"):
        measured(Layout(width=2), "1MiB", 1)
    assert free[0].peak_bytes > 1 << 20


def test_a_budget_and_recomputation_are_refused_together() -> None:
    with pytest.raises(PlanError, match="a budget decides"):
        Plan().replace({"memory.budget": "1GiB", "memory.recompute": "all"}, Provenance())
    with pytest.raises(PlanError, match=r"are for a memory\.budget"):
        Plan().replace({"memory.disk": "/tmp"}, Provenance())
    with pytest.raises(PlanError, match=r"memory\.budget: 24 has no unit"):
        Plan().replace({"memory.budget": "24"}, Provenance())


def test_what_a_net_does_besides_computing_is_done_once() -> None:
    net = Net().double()
    model: list[ParallelModel] = []

    def check(mesh: Mesh) -> None:
        model.append(ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss()))
        for x, y in batches():
            model[0].step(x, y)

    run_ranks(Layout(), check, plan=budget_of(Layout(), "1TiB", Path.cwd()))
    assert int(net.norm.num_batches_tracked) == len(batches())


@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore:memory.budget =")
@pytest.mark.long(every=4)
@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, width=2)], ids=str)
def test_replicas_that_divide_parameters(layout: Layout, shard: str) -> None:
    if shard == "parameters" and layout.tiles > 1:
        with pytest.raises(PlanError, match="gathers layer by layer"):
            run_ranks(layout, divided(Deep()), plan=budget_of(layout, "1TiB", Path.cwd(), shard))
        return
    torch.manual_seed(3)
    net = Deep(6 if layout.tiles > 1 else 12).double()
    ((free, told, held), *_) = run_ranks(
        layout, divided(net), plan=budget_of(layout, "1TiB", Path.cwd(), shard), timeout_s=200
    )
    budget = told.total_bytes - int(0.3 * told.peak_bytes) + 2 * told.trained_bytes
    for steps, tight, peak in run_ranks(
        layout,
        divided(net),
        plan=budget_of(layout, f"{budget}B", Path.cwd(), shard),
        timeout_s=200,
    ):
        assert tight.total_bytes <= budget
        assert peak <= budget - (tight.total_bytes - tight.peak_bytes) and peak < held
        for number, (own, right) in enumerate(zip(steps, free, strict=True)):
            where = f"step {number}: {{}}".format
            torch.testing.assert_close(own, right, rtol=0.0, atol=0.0, msg=where)


def divided(net: nn.Module) -> Callable[[Mesh], tuple[list[dict[str, Tensor]], Any, int]]:
    def check(mesh: Mesh) -> tuple[list[dict[str, Tensor]], Any, int]:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        optim = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = images()
        batch, found = model.shard(x.double(), y.double()), list[dict[str, Tensor]]()
        peak = 0
        for number in range(4):
            counting = Live() if number == 3 else nullcontext()  # before, the net is recorded anew
            with counting as live:
                model.step(*batch)
            peak = live.peak_bytes if live else 0
            optim.step()
            optim.zero_grad()
            found.append({n: t.clone() for n, t in model.full_state_dict().items()})
        return found, model.memory(*batch), peak

    return check
