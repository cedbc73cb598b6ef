"""A memory budget for nets that cannot be recorded: what runs again does nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.memory.plain import blocks_of
from fivefold.plan import Layout, Plan, Provenance
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:memory.budget =", "ignore:whether the samples")


class Own(torch.autograd.Function):
    """Of a user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


class Block(nn.Module):
    """Does what a forward may do besides computing: counts, keeps, draws, updates."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.calls, self.sums = 0, list[float]()
        self.register_buffer("seen", torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # What was counted and seen before is a part of what is computed.
        y = self.drop(self.norm(self.first(x))) * (1 + 0.1 * self.calls) + self.seen.clone()
        with torch.no_grad():
            self.seen += 0.1
        self.sums.append(float(self.calls))
        return x + cast(Tensor, Own.apply(y))


def _note_backward(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    cast(Block, module).sums.append(-1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32) for _ in range(5)))
        self.head = nn.Linear(32, 4)
        # No recording sees it.
        self.blocks[1].register_full_backward_hook(_note_backward)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def batches() -> list[tuple[Tensor, Tensor]]:
    made: list[tuple[Tensor, Tensor]] = []
    for number, rows in enumerate([96, 96, 80, 96]):
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(rows, 32, generator=draw, dtype=torch.float64)
        made.append((x, torch.randint(0, 4, (rows,), generator=draw)))
    return made


def trained(net: nn.Module) -> Callable[[Mesh], tuple[list[dict[str, Any]], Any]]:
    def check(mesh: Mesh) -> tuple[list[dict[str, Any]], Any]:
        own, found, told = copy.deepcopy(net), list[dict[str, Any]](), None
        model = ff.parallelize(own, mesh, loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches():
            x, y = model.shard(*batch)
            optim.zero_grad(set_to_none=False)
            model.step(x, y)
            if mesh.plan.memory.budget:
                told = model.memory(x, y)
            found.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            found[-1] |= {n: b.clone() for n, b in model.named_buffers()}
            found[-1]["calls"] = [(b.calls, list(b.sums)) for b in blocks_of(own)]  # type: ignore[union-attr]
            optim.step()
        return found, told

    return check


def plan_of(layout: Layout, budget: str, **more: str) -> Plan:
    words = {"memory.budget": budget} if budget else {}
    return Plan(layout=layout).replace({**words, **more}, Provenance())


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2)], ids=str)
def test_children_that_run_again_do_nothing_twice(layout: Layout) -> None:
    torch.manual_seed(1)
    net = Net().double()
    expected = [found for found, _ in run_ranks(layout, trained(net), plan=plan_of(layout, ""))]
    kept = run_ranks(layout, trained(net), plan=plan_of(layout, "1TiB"))
    told = kept[0][1]
    assert "everything is kept" in str(told.choices) and "hook of its backward" in str(told.choices)
    budget = f"{told.total_bytes - int(0.3 * told.peak_bytes) + 2 * told.trained_bytes}B"
    again = run_ranks(layout, trained(net), plan=plan_of(layout, budget))
    assert "each is computed again" in str(again[0][1].choices)
    assert again[0][1].total_bytes < told.total_bytes
    for made in (kept, again):
        for rank, (steps, _) in enumerate(made):
            for own, right in zip(steps, expected[rank], strict=True):
                assert own.keys() == right.keys()
                for name, value in right.items():
                    assert torch.equal(own[name], value) if name != "calls" else own[name] == value
    assert [calls for calls, _ in again[0][0][-1]["calls"]] == [len(batches())] * 5


def test_what_was_held_is_told_where_it_is_too_much() -> None:
    net = Net().double()
    with pytest.raises(
        UsageError,
        match=r"is too little: a step held .* though each of 5 modules was computed again",
    ):
        run_ranks(Layout(), trained(net), plan=plan_of(Layout(), "100KiB"))


def test_why_a_net_is_not_recorded_is_told(recwarn: pytest.WarningsRecorder) -> None:
    net = Net().double()

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        x, y = batches()[0]
        model.step(x, y)
        with pytest.raises(UsageError, match="measured in the first one"):
            model.memory(x[:7], y[:7])

    run_ranks(Layout(), check, plan=plan_of(Layout(), "1TiB"))
    told = [str(one.message) for one in recwarn if "memory.budget" in str(one.message)]
    assert len(told) <= 1  # once in a process
    assert all("hook of its backward" in one and "5 modules" in one for one in told)


def test_blocks_are_children_of_lists_and_sequences() -> None:
    one, other, third, head = (
        Block(4),
        Block(4),
        Block(4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    )
    body = nn.Sequential(one, nn.ModuleList([other, nn.ReLU()]), third)
    net = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "body": body, "twice": one, "head": head})
    assert blocks_of(net) == [one, other, third, head]
    assert blocks_of(net, [one.first]) == [other, third, head]
