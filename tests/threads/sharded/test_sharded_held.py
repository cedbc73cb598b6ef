"""What each replica holds of divided parameters, and what cannot be divided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.parallel import ParallelModel, gathering, parallelize
from fivefold.plan import Layout, Parallel, Pipeline, Plan
from ranks import run_ranks
from sharding import BOTH, Dropped, X, Y, on, plan_of, small


@pytest.fixture
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the smallest nets are units of their own."""
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)


BLOCKS = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))
DEEP = nn.Sequential(*BLOCKS, nn.Linear(64, 3))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_state_dicts_have_the_plain_keys_and_go_both_ways(shard: str) -> None:
    torch.manual_seed(5)
    net, batch = Dropped(), (torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0]))

    def check(mesh: Mesh) -> bool:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model.step(*model.shard(*batch))
        optimizer.step()
        parts, whole = model.state_dict(), model.full_state_dict()
        assert list(parts) == list(whole) == list(net.state_dict())
        assert not any(isinstance(value, DTensor) for value in whole.values())
        plain = copy.deepcopy(net)
        plain.load_state_dict(whole)
        whole = plain.state_dict()  # buffers of the other are those of the net
        model.load_state_dict(net.state_dict())
        again = model.full_state_dict()
        assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())
        model.load_state_dict(whole)
        again = model.full_state_dict()
        assert all(torch.equal(again[name], value) for name, value in plain.state_dict().items())
        model.module.load_state_dict(net.state_dict())  # as a script does that holds the net itself
        again = model.full_state_dict()
        return all(torch.equal(again[name], value) for name, value in net.state_dict().items())

    assert all(on(shard, 2, check))


@BOTH
def test_an_evaluation_in_inference_mode_may_come_first(shard: str) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(6, 5), torch.randint(0, 4, (6,))

    def check(mesh: Mesh) -> None:
        model = parallelize(copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss())
        batch = model.shard(x, y)
        with torch.inference_mode():
            found = model.evaluate(*batch, lambda out, _y: out.double().sum().view(1))
        torch.testing.assert_close(found, net(x).detach().double().sum().view(1))
        for _ in range(2):
            loss = model.step(*batch)
        torch.testing.assert_close(loss, F.cross_entropy(net(x), y).detach())

    on(shard, 2, check)


@pytest.mark.parametrize("layout", [Layout(data=2, width=2), Layout(data=2, pipe=2)], ids=str)
def test_tiles_and_stages_evaluate_and_load_as_well(layout: Layout) -> None:
    torch.manual_seed(6)
    net, other, x = Dropped().eval(), Dropped(), torch.randn(5, 3, 8, 8)

    def check(mesh: Mesh) -> bool:
        model = parallelize(copy.deepcopy(other), mesh, example=x, loss=nn.CrossEntropyLoss())
        model.load_state_dict(net.state_dict())
        model.eval()
        with torch.no_grad():
            outputs = model(model.shard(x))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        state = model.full_state_dict()
        part = part_of(outputs)
        assert part is not None
        expected = net(x)[part.origin[0] :][: len(outputs)]
        return torch.allclose(outputs, expected, atol=1e-5) and all(
            torch.equal(state[name], value) for name, value in net.state_dict().items()
        )

    assert all(run_ranks(layout, check, plan=plan_of("optimizer", layout)))


@BOTH
@pytest.mark.usefixtures("_layer_by_layer")
def test_evaluation_leaves_the_parameters_in_parts(shard: str) -> None:
    def check(mesh: Mesh) -> bool:
        model = parallelize(small(), mesh, loss=nn.MSELoss()).eval()
        with torch.no_grad():
            outputs = model(X)
        model(X)  # with a graph that nobody differentiates
        parts = [p for p in model.parameters() if isinstance(p, DTensor)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train().step(*model.shard(X, Y))
        optimizer.step()
        plain = small()
        after = model.full_state_dict()["0.weight"]
        return (
            len(parts) == 4
            and torch.equal(outputs, plain(X))
            and not torch.equal(after, plain.state_dict()["0.weight"])
        )

    assert all(on(shard, 2, check))


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def peak_of(model: ParallelModel) -> int:
    """The most bytes of whole parameters during a step: counted when a layer runs, and runs backward."""
    reducer: Any = model._reducer[0]
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        whole = getattr(reducer, "_whole", None) or list(model.module.parameters())
        most = max(most, bytes_of([p for p in whole if not isinstance(p, DTensor)]))

    def watch(_module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        count()
        outputs.register_hook(count)

    for module in model.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch)
    x = torch.randn(4, 64)
    model.step(*model.shard(x, torch.randn(4, 3)))
    return most


def test_layers_are_whole_only_while_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1 << 10)
    total = bytes_of(list(DEEP.parameters()))

    def check(mesh: Mesh) -> int:
        return peak_of(parallelize(copy.deepcopy(DEEP), mesh, loss=nn.MSELoss()))

    apart = Parallel(
        rows="apart"
    )  # the layers run as they are, though hooks look at their gradients
    for most in on("optimizer", 2, check, parallel=apart):
        assert total <= most <= 1.01 * total  # three rows over two ranks are rounded up
    for most in on("parameters", 2, check, parallel=apart):
        assert total / 17 <= most <= total / 4


@BOTH
def test_replicas_hold_parameters_gradients_and_optimizer_state_once(shard: str) -> None:
    total = sum(p.numel() for p in DEEP.parameters())

    def check(mesh: Mesh) -> list[int]:
        model = parallelize(copy.deepcopy(DEEP), mesh, loss=nn.MSELoss())
        optimizer = torch.optim.Adam(model.parameters())
        model.step(*model.shard(torch.randn(4, 64), torch.randn(4, 3)))
        optimizer.step()
        kinds: list[list[Any]] = [
            list(model.parameters()),
            [p.grad for p in model.parameters()],
            [optimizer.state[p]["exp_avg"] for p in model.parameters()],
            [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()],
        ]
        return [sum(t.to_local().numel() for t in kind) for kind in kinds]

    held = on(shard, 3, check)
    for kind in zip(*held, strict=True):
        assert sum(kind) == total
        assert max(kind) <= 0.36 * total


def refused(net: nn.Module, plan: Plan, error: type[Exception], match: str) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(error, match=match):
            parallelize(net, mesh, example=torch.zeros(4, 3, 8, 8), loss=nn.MSELoss())

    run_ranks(plan.layout, check, plan=plan)


def test_layouts_that_cannot_divide_parameters_say_which_can() -> None:
    tiles = plan_of("parameters", Layout(data=2, height=2))
    refused(Dropped(), tiles, PlanError, 'data=2,height=2: memory.shard = "optimizer" works')
    gems = plan_of("optimizer", Layout(data=2, pipe=2), pipeline=Pipeline("gems"))
    refused(Dropped(), gems, PlanError, '"gems"|gems.*use another schedule')


def test_parameters_that_cannot_be_divided_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self, parameter: Tensor) -> None:
            super().__init__()
            self.odd = nn.Parameter(parameter)

    plan = plan_of("optimizer", 2)
    refused(Odd(torch.tensor(1.0)), plan, UsageError, "'odd' has no dim")
    refused(Odd(torch.ones(3, dtype=torch.complex64)), plan, UsageError, "'odd' is complex")
    sparse = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True))
    refused(sparse, plan, UsageError, "'0' has sparse gradients")


@pytest.mark.usefixtures("_layer_by_layer")
def test_layers_that_hooks_do_not_see_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "PARTS", 1)

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.linear.weight)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4).double()
            self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    def check(mesh: Mesh, build: Callable[[], nn.Module], match: str) -> None:
        model = parallelize(build(), mesh, loss=nn.MSELoss())
        with pytest.raises(UsageError, match=match + '.*memory.shard = "optimizer"'):
            model.step(*model.shard(X, Y))

    plan = plan_of("parameters", 2)
    run_ranks(2, check, Direct, "without calling it", plan=plan)
    run_ranks(2, check, InPlace, "inplace=False", plan=plan)


def test_memory_is_told_for_what_a_rank_holds() -> None:
    def check(mesh: Mesh) -> int:
        model = parallelize(Dropped(), mesh, loss=nn.CrossEntropyLoss())
        told = model.memory(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
        return told.total_bytes - told.peak_bytes

    layout = Layout(data=2, height=2)
    divided = run_ranks(layout, check, plan=plan_of("optimizer", layout))
    whole = run_ranks(layout, check, plan=plan_of("none", layout))
    assert all(part < all_of_it for part, all_of_it in zip(divided, whole, strict=True))


def test_a_net_is_made_parallel_once() -> None:
    def check(mesh: Mesh) -> None:
        net = small()
        parallelize(net, mesh, loss=nn.MSELoss())
        with pytest.raises(UsageError, match="divide among them already"):
            parallelize(net, mesh, loss=nn.MSELoss())

    on("optimizer", 2, check)


def test_one_replica_has_nothing_to_divide() -> None:
    def check(mesh: Mesh) -> bool:
        model = parallelize(small(), mesh, loss=nn.MSELoss())
        model.step(*model.shard(X, Y))
        return not any(isinstance(p, DTensor) for p in model.parameters())

    assert on("parameters", 1, check) == [True]


class Following(nn.Module):
    """A teacher that follows its student in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) + self.teacher(x)


@BOTH
@pytest.mark.parametrize("rows", ["auto", "apart"])
def test_what_a_forward_writes_to_a_divided_parameter_is_refused(shard: str, rows: Any) -> None:
    def check(mesh: Mesh) -> None:
        model = parallelize(Following(), mesh, loss=nn.MSELoss())
        batch = model.shard(torch.randn(4, 4), torch.randn(4, 3))
        with pytest.raises(
            UsageError, match=r"changes its parameter 'teacher\.weight' in its forward"
        ):
            model.step(*batch)

    run_ranks(2, check, plan=plan_of(shard, 2, parallel=Parallel(rows=rows)))


class Fails(nn.Module):
    """Raises in the middle, or its loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        if self.fails == "net":
            raise ValueError("this batch is not for me")
        return self.last(x.tanh())

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.fails == "loss":
            raise ValueError("this batch is not for me")
        return F.mse_loss(outputs, targets)


@BOTH
@pytest.mark.parametrize("where", ["net", "loss"])
@pytest.mark.parametrize("least", [1, gathering.LEAST_BYTES], ids=["by layer", "at once"])
@pytest.mark.filterwarnings("ignore:whether the samples", "ignore:the loss")
def test_training_goes_on_after_a_step_that_raised(
    least: int, where: str, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "LEAST_BYTES", least)
    torch.manual_seed(7)
    start = Fails().double()
    x, y = torch.randn(6, 8).double(), torch.randn(6, 8).double()

    def check(mesh: Mesh) -> None:
        net, one = copy.deepcopy(start), copy.deepcopy(start)
        model = parallelize(net, mesh, loss=net.compare)
        ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            net.fails = where if step == 2 else ""
            if net.fails:
                with pytest.raises(ValueError, match="not for me"):
                    model.step(*model.shard(x, y))
                continue
            model.step(*model.shard(x, y))
            F.mse_loss(one(x), y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for got, wanted in zip(model.full_state_dict().values(), one.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-12)

    on(shard, 2, check)
