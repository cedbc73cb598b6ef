"""A recording stands for what it saw: what changes between steps, or by a forward, is as in one process."""

from __future__ import annotations

import copy
import dataclasses
import gc
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

import fivefold as ff
from fivefold.data import loader
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.graph.record import record
from fivefold.plan import Layout, Pipeline, Plan
from fivefold.torch_private import CHECKPOINT
from ranks import run_ranks

LAYOUTS = [Layout(data=2), Layout(width=2), Layout(pipe=2)]
STEPS = 4
GAIN = {"now": 1.0}
torch.manual_seed(8)
X, Y = torch.randn(4, 2, 6, 8, dtype=torch.float64), torch.randn(4, 3, 6, 8, dtype=torch.float64)


class Net(nn.Module):
    """Two convolutions with something between them."""

    factor = 1.0
    seen: Tensor
    scale: Tensor

    def __init__(self, middle: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.act: nn.Module = nn.Tanh()
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 3, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.cache: dict[Any, Tensor] = {}
        self.history: list[float] = []
        self.middle = middle

    def forward(self, x: Tensor, mode: str = "plain", gain: float = 1.0) -> Tensor:
        y = self.norm(self.act(self.first(x))) * self.factor * self.scale * gain
        y = y if self.middle is None else self.middle(self, y)
        return self.last(y.relu() if mode == "relu" else y)


# ---- what changes between steps


def factor(net: Net, step: int) -> None:
    net.factor = 0.5 + step


def dilation(net: Net, step: int) -> None:
    net.first.dilation = net.first.padding = (1 + step % 2,) * 2


def tensor(net: Net, step: int) -> None:
    net.scale = torch.tensor(1.0 + step, dtype=torch.float64)


def module(net: Net, step: int) -> None:
    net.act = (nn.Tanh(), nn.ReLU(), nn.Identity(), nn.Tanh())[step]


def frozen(net: Net, step: int) -> None:
    net.first.weight.requires_grad_(step % 2 == 0)


def in_evaluation(net: Net, step: int) -> None:
    net.norm.train(step < 2)


def untracked(net: Net, step: int) -> None:
    net.norm.track_running_stats = step == 0  # in evaluation torch uses what it has tracked
    net.norm.train(step < 2)


def hook(net: Net, step: int) -> None:
    if step in {1, 3}:
        net.act.register_forward_hook(lambda _m, _x, y: y * (1.0 + step))


def of_a_global(_net: Net, step: int) -> None:
    GAIN["now"] = 1.0 + step


def by_gain(_net: Net, y: Tensor) -> Tensor:
    return y * GAIN["now"]


# ---- what a forward does besides computing


def assigned(net: Net, y: Tensor) -> Tensor:
    net.seen = net.seen + 1
    return y * net.seen


def in_place(net: Net, y: Tensor) -> Tensor:
    net.seen.add_(1)
    torch._foreach_mul_([net.seen], 1.5)  # type: ignore[attr-defined]
    return y * net.seen


def by_data(net: Net, y: Tensor) -> Tensor:
    net.seen.data = net.seen.data * 0.5
    net.seen.detach().view(1)[:] += 2
    return y + net.seen


def hooked(_net: Net, y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return y


def cached(net: Net, y: Tensor) -> Tensor:
    key = y.shape[1]
    if key not in net.cache:
        net.cache[key] = torch.arange(key, dtype=y.dtype)[:, None, None]
    return y * net.cache[key]


def counted(net: Net, y: Tensor) -> Tensor:
    net.history.append(float(len(net.history)))
    return y * (1 + sum(net.history))


def region(_net: Net, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 1:3] = y[:, :2] * 2
    y[:, 0].mul_(3)
    return y


Change = Callable[[Net, int], None]
CHANGES: dict[str, tuple[Change | None, Callable[[Net, Tensor], Tensor] | None]] = {
    "factor": (factor, None), "dilation": (dilation, None), "tensor": (tensor, None),
    "module": (module, None), "frozen": (frozen, None), "evaluation": (in_evaluation, None),
    "untracked": (untracked, None),
    "hook": (hook, None), "global": (of_a_global, by_gain), "assigned": (None, assigned),
    "in place": (None, in_place), "data": (None, by_data), "hooked": (None, hooked),
    "cached": (None, cached), "counted": (None, counted), "region": (None, region),
}  # fmt: skip


def plan_of(layout: Layout) -> Plan:
    return Plan(layout=layout, pipeline=Pipeline(schedule="layer"))


def inputs_of(step: int) -> dict[str, Any]:
    """Strings and numbers among the inputs, and their order, change as well."""
    told: dict[str, Any] = {"mode": ("plain", "relu")[step % 2], "gain": 1.0 + step // 2}
    return {"x": X, **told} if step % 3 else {**told, "x": X}


def trained(step: Callable[[int], object], net: Net, change: Change | None, own: Any) -> None:
    optimizer = torch.optim.SGD(list(own.parameters()), lr=0.1)
    for number in range(STEPS):
        if change is not None:
            change(net, number)
        step(number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings("ignore:.*is another one in every forward")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_steps_are_those_of_one_process(name: str, layout: Layout) -> None:
    change, middle = CHANGES[name]
    torch.manual_seed(1)
    start = Net(middle).double()

    plain = copy.deepcopy(start)
    trained(
        lambda n: nn.functional.mse_loss(plain(**inputs_of(n)), Y).backward(), plain, change, plain
    )

    GAIN["now"] = 1.0  # ranks are threads, which share it: as the first step sets it

    def check(mesh: Mesh) -> tuple[dict[str, Tensor], bool]:
        net = copy.deepcopy(start)
        model = ff.parallelize(net, mesh, example=inputs_of(0), loss=nn.MSELoss())

        def step(number: int) -> None:
            model.step(model.shard(inputs_of(number)), model.shard(X, Y)[1])

        trained(step, net, change, model)
        held = [*net.cache.values(), *net.parameters(), *net.buffers()]
        real = all(type(t) in {Tensor, nn.Parameter} for t in held)
        return model.full_state_dict(), real and net.history == plain.history

    for state, real in run_ranks(layout.size, check, plan=plan_of(layout)):
        assert real
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12, msg=key)


# ---- what is kept of a recording


def test_who_looks_at_frames_meanwhile_keeps_nothing() -> None:
    # As a sampling profiler does, and the watcher of a run's trace.
    thread, done = threading.get_ident(), threading.Event()

    def look() -> None:
        while not done.is_set():
            frame = sys._current_frames().get(thread)
            time.sleep(0.005)
            del frame

    net = Net().double()
    looks = threading.Thread(target=look)
    looks.start()
    try:
        for _ in range(10):
            record(net, lambda net, x: net(x), X, [X.shape])
    finally:
        done.set()
        looks.join()


def test_what_is_kept_elsewhere_is_refused() -> None:
    kept: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def keep(_net: Net, y: Tensor) -> Tensor:
        kept.put(y)
        return y

    told = r"of shape \(4, 4, 6, 8\) outside of its modules \(in a list\)"
    with pytest.raises(UsageError, match=told):
        record(Net(keep).double(), lambda net, x: net(x), X, [X.shape])


@pytest.mark.skipif(
    CHECKPOINT != "_checkpoint_without_reentrant_generator",
    reason="as torch before 2.13 does it; from 2.14 on, what it calls takes other arguments",
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_refusal_within_a_checkpoint_leaves_nothing_behind() -> None:
    def old_checkpoint(norm: nn.Module, y: Tensor) -> Tensor:
        # As torch does before 2.13: a part that raises leaves its side of a checkpoint suspended.
        around = getattr(torch_checkpoint, CHECKPOINT)(
            norm, True, noop_context_fn, "default", False, True, y
        )
        next(around)
        made = norm(y)
        assert next(around, None) is None
        return made

    def nested(net: Net, y: Tensor) -> Tensor:
        return old_checkpoint(lambda y: old_checkpoint(net.norm, y), y)

    with pytest.raises(
        UsageError, match=r"updates norm.running_mean, which is then counted several times"
    ) as told:
        record(Net(nested).double(), lambda net, x: net(x), X, [X.shape])
    assert told.type is UsageError, "LeftBehind: nobody may run the net"
    gc.collect()


TABLES: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


def tabled(net: Net, y: Tensor) -> Tensor:
    """Keeps a table where no recording finds it."""
    if net.norm not in TABLES:
        TABLES[net.norm] = torch.linspace(0, 1, 4, dtype=y.dtype)[:, None, None]
    return y * TABLES[net.norm]


def tabled_and_asked(net: Net, y: Tensor) -> Tensor:
    y = tabled(net, y)
    return y if float(y.detach().sum()) > -1e9 else -y


def queued(_net: Net, y: Tensor) -> Tensor:
    QUEUE.put(y)
    return y * 2


QUEUE: queue.SimpleQueue[Tensor] = queue.SimpleQueue()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:whether the samples of a batch depend on each other")
@pytest.mark.parametrize("middle", [tabled, tabled_and_asked])
def test_no_tensor_without_numbers_stays_in_a_cache(middle: Any) -> None:
    start = Net(middle).double()
    plain = copy.deepcopy(start)
    wanted = nn.functional.mse_loss(plain(X), Y)
    wanted.backward()

    def check(mesh: Mesh) -> None:
        gc.unfreeze()  # what `run_ranks` froze: a frozen table is found by nobody, and the net refused
        net = copy.deepcopy(start)
        model = ff.parallelize(net, mesh, loss=nn.MSELoss())
        torch.testing.assert_close(model.step(*model.shard(X, Y)), wanted.detach())
        assert type(TABLES[net.norm]) is Tensor
        for own, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)

    run_ranks(2, check)


def test_a_net_that_nobody_can_free_of_the_recording_is_refused_on_the_data_axis_too() -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(Net(queued).double(), mesh, loss=nn.MSELoss())
        with pytest.raises(UsageError, match=r"keeps a tensor of shape .* outside of its modules"):
            model.step(*model.shard(X, Y))

    try:
        run_ranks(2, check)
    finally:
        while not QUEUE.empty():
            QUEUE.get()


def test_what_a_recording_has_taken_from_an_iterator_is_not_taken_again() -> None:
    def check(mesh: Mesh) -> None:
        numbers = (float(n) for n in range(9))
        model = ff.parallelize(
            Net(lambda _net, y: y * next(numbers)).double(), mesh, loss=nn.MSELoss()
        )
        with pytest.raises(UsageError, match="may take from the iterator"):
            model.step(*model.shard(X, Y))

    run_ranks(2, check)


# ---- what guards do not see


def reading(path: Path) -> Callable[[Net, Tensor], Tensor]:
    """A net that reads a file in every forward."""
    return lambda _net, y: y * float(path.read_text())


@pytest.mark.parametrize("at", [1, 2])
def test_what_guards_do_not_see_shows_when_the_net_is_recorded_again(
    at: int, tmp_path: Path
) -> None:
    path = tmp_path / "gain"

    def check(mesh: Mesh) -> list[float]:
        model = ff.parallelize(copy.deepcopy(start), mesh, loss=nn.MSELoss())
        found: list[float] = []
        for step in range(4):
            mesh.agreement.same(step)  # all ranks have made the step before
            if mesh.rank == 0:
                path.write_text("1.0" if step < at else "3.0")
            mesh.agreement.same(step)
            found.append(float(model.step(*model.shard(X, Y))))
        return found

    start = Net(reading(path)).double()
    expected: list[float] = []
    plain = copy.deepcopy(start)
    for step in range(4):
        path.write_text("1.0" if step < at else "3.0")
        expected.append(nn.functional.mse_loss(plain(X), Y).item())
    with pytest.warns(UserWarning, match=r"does not compute the same twice.*test_guards\.py"):
        found = run_ranks(2, check, plan=Plan(layout=Layout(width=2)))[0]
    assert found == pytest.approx(expected, rel=1e-9)


class Pictures(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def test_a_new_epoch_records_again(tmp_path: Path) -> None:
    path = tmp_path / "gain"
    start = Net(reading(path)).double()

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(start), mesh, loss=nn.MSELoss())
        data = loader(Pictures(), mesh, batch_size=1, seed=0)
        for epoch in range(2):
            mesh.agreement.same(epoch)
            if mesh.rank == 0:
                path.write_text(f"{epoch + 1}.0")
            mesh.agreement.same(epoch)
            for x, y in data:
                model.step(x, y)

    with pytest.warns(UserWarning, match="does not compute the same twice"):
        run_ranks(2, check, plan=Plan(layout=Layout(width=2)))


# ---- outputs


@dataclasses.dataclass
class Two:
    map: Tensor
    mean: Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Net()

    def forward(self, x: Tensor) -> Two:
        y = self.body(x)
        return Two(y, y.mean((2, 3)))


class TwoLoss:
    def __call__(self, outputs: Two, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs.map, targets) + outputs.mean.square().mean()


@pytest.mark.filterwarnings(
    "ignore:the loss .TwoLoss.", "ignore:the loss cannot be computed in tiles"
)
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_dataclasses_are_outputs(layout: Layout) -> None:
    torch.manual_seed(2)
    net = Structured().double()

    def check(mesh: Mesh) -> float:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=TwoLoss())
        return float(model.step(*model.shard(X, Y)))

    expected = TwoLoss()(copy.deepcopy(net)(X), Y).item()
    assert run_ranks(2, check, plan=Plan(layout=layout)) == pytest.approx([expected] * 2)


def test_decisions_by_numbers_are_refused_with_their_line() -> None:
    def by_mean(_net: Net, y: Tensor) -> Tensor:
        return y if y.mean() > 0 else -y

    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=r"\(test_guards\.py:\d+\) depends on the numbers"):
            ff.parallelize(Net(by_mean).double(), mesh, example=X, loss=nn.MSELoss())

    run_ranks(2, check, plan=Plan(layout=Layout(width=2)))


def test_numbers_that_change_behind_the_back_of_autograd_are_refused() -> None:
    def late(net: Net, y: Tensor) -> Tensor:
        net.scale.data = (
            net.scale.data * 0.5
        )  # backward of what was multiplied by it would see this
        return y

    def check(mesh: Mesh) -> None:
        with pytest.raises(
            UsageError, match=r"changes a tensor by \.data that it has computed with before"
        ):
            ff.parallelize(Net(late).double(), mesh, example=X, loss=nn.MSELoss())

    run_ranks(2, check, plan=Plan(layout=Layout(width=2)))
