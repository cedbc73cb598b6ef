"""What `step`, `shard` and calling a parallel model promise, beyond the numbers of test_exact_zoo."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh, Part, part_of
from fivefold.plan import Layout, Parallel, Plan
from fivefold.trace import Phase, Tag, recording
from ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc(x.view(x.size(0), -1))  # which an empty batch would not survive


torch.manual_seed(5)
NET = Net().double()
X, Y = torch.randn(7, 2, 5, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
LOSS = nn.CrossEntropyLoss()


def reference(x: Tensor = X, y: Tensor = Y, times: int = 1) -> tuple[float, list[Tensor]]:
    net = copy.deepcopy(NET)
    for _ in range(times):
        loss = LOSS(net(x), y)
        loss.backward()
    return loss.item(), [p.grad for p in net.parameters()]  # type: ignore[misc]


def close(got: list[Tensor], expected: list[Tensor]) -> bool:
    scale = max(e.norm().item() for e in expected)
    return all((g - e).norm() < 1e-12 * scale for g, e in zip(got, expected, strict=True))


def test_a_part_that_is_noted_needs_no_exchange_and_a_plain_share_works_too() -> None:
    def check(mesh: Mesh, noted: bool) -> tuple[float, list[Tensor], bool]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        x, y = model.shard(X, Y)
        if not noted:
            x, y = x.clone(), y.clone()
        for _ in range(2):  # before the first ranks compare batches, before the second parameters
            model.step(x, y)
            model.zero_grad()
        with recording() as recorder:
            loss = model.step(x, y).item()
        return loss, [p.grad for p in model.parameters()], Tag.CONTROL in recorder.stats

    apart = Plan(layout=Layout(data=3), parallel=Parallel(rows="apart"))
    for noted in (True, False):
        for loss, grads, exchanged in run_ranks(3, check, noted, plan=apart):
            assert loss == pytest.approx(reference()[0], rel=1e-13)
            assert close(grads, reference()[1])
            assert exchanged is not noted


def test_the_same_samples_on_all_replicas_are_told() -> None:
    y = torch.arange(6) % 3

    def check(mesh: Mesh, *batches: tuple[Tensor, Tensor]) -> None:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        for _ in range(2):
            model.step(*batches[mesh.rank])

    whole, zeros = (X[:6], y), (torch.zeros_like(X[:6]), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, check, (X[:2], y[:2]), (X[2:6], y[2:]))
        run_ranks(2, check, zeros, zeros)
        assert not caught
        run_ranks(2, check, whole, whole)
    assert len(caught) == 2  # both ranks, in their first step alone
    assert "all 2 replicas gave model.step the same samples" in str(caught[0].message)


def test_shards_know_what_they_are_part_of() -> None:
    def check(mesh: Mesh) -> tuple[Part | None, Part | None, list[int]]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        x, targets = model.shard(X, {"y": Y})
        return part_of(x), part_of(targets["y"]), targets["y"].tolist()

    parts = run_ranks(3, check)
    assert parts[1] == (Part((7, 2, 5, 4), (2, 0, 0, 0)), Part((7,), (2,)), Y[2:4].tolist())
    assert [y for part in parts for y in part[2]] == Y.tolist()


def test_repeated_steps_accumulate() -> None:
    def check(mesh: Mesh) -> list[Tensor]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        for _ in range(3):
            model.step(*model.shard(X, Y))
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    for grads in run_ranks(2, check):
        assert close(grads, reference(times=3)[1])


def test_fewer_samples_than_ranks_leave_empty_shares() -> None:
    def check(mesh: Mesh) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        loss = model.step(*model.shard(X[:2], Y[:2])).item()
        return loss, [p.grad for p in model.parameters()], model.state_dict()  # type: ignore[misc]

    expected = reference(X[:2], Y[:2])
    results = run_ranks(4, check)
    for loss, grads, state in results:
        assert loss == pytest.approx(expected[0], rel=1e-13)
        assert close(grads, expected[1])
        assert all(torch.equal(state[k], results[0][2][k]) for k in state)


def test_names_are_those_of_the_plain_net() -> None:
    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(NET)
        model = ff.parallelize(net, mesh, loss=LOSS)
        assert model.module is net
        assert list(model.state_dict()) == list(NET.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in NET.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in NET.named_buffers()]
        assert [id(p) for p in model.parameters()] == [id(p) for p in net.parameters()]
        model.step(*model.shard(X, Y))
        assert all("forward" not in vars(module) for module in net.modules())
        model.load_state_dict(NET.state_dict())
        assert torch.equal(model.module.fc.weight, NET.fc.weight)

    run_ranks(2, check)


def test_replicas_start_from_the_first_ones_weights() -> None:
    def check(mesh: Mesh) -> Tensor:
        net = copy.deepcopy(NET)
        with torch.no_grad():
            net.fc.weight += mesh.rank
            net.bn.running_mean += mesh.rank
        model = ff.parallelize(net, mesh, loss=LOSS)
        return torch.cat([model.module.fc.weight.flatten(), model.module.bn.running_mean])

    results = run_ranks(2, check)
    assert torch.equal(results[0], results[1])


def test_evaluation_gives_the_outputs_of_ones_own_samples() -> None:
    plain = copy.deepcopy(NET).eval()(X)

    def check(mesh: Mesh, n: int) -> Tensor:
        model = ff.parallelize(copy.deepcopy(NET), mesh).eval()
        with torch.no_grad():
            return model(model.shard(X[:n]))

    for n in (7, 2):
        assert torch.allclose(torch.cat(run_ranks(3, check, n)), plain[:n], rtol=1e-13)


def test_a_training_forward_outside_step_uses_the_statistics_of_all_ranks() -> None:
    whole = copy.deepcopy(NET)(X)

    def check(mesh: Mesh) -> Tensor:
        model = ff.parallelize(copy.deepcopy(NET), mesh)
        return model(model.shard(X)).detach()

    assert torch.allclose(torch.cat(run_ranks(3, check)), whole, rtol=1e-12)


def test_statistics_of_each_replica_where_the_plan_asks_for_them() -> None:
    plan = Plan(layout=Layout(data=2), parallel=Parallel(batch_norm="replica"))

    def check(mesh: Mesh) -> Tensor:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        return model(model.shard(X)).detach()

    own = [copy.deepcopy(NET)(part) for part in (X[:3], X[3:])]
    for got, expected in zip(run_ranks(2, check, plan=plan), own, strict=True):
        assert torch.allclose(got, expected, rtol=1e-12)


def test_the_scaler_scales_gradients_and_not_the_loss_returned() -> None:
    def check(mesh: Mesh) -> tuple[float, list[Tensor]]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model.step(*model.shard(X, Y), scaler=scaler).item()
        scaler.unscale_(optim)
        return loss, [p.grad for p in model.parameters()]  # type: ignore[misc]

    for loss, grads in run_ranks(2, check):
        assert loss == pytest.approx(reference()[0], rel=1e-13)
        assert close(grads, reference()[1])


def test_clipping_sees_the_whole_gradient() -> None:
    def check(mesh: Mesh) -> tuple[float, list[Tensor]]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        model.step(*model.shard(X, Y))
        norm = ff.clip_grad_norm_(model, 0.01).item()
        return norm, [p.grad for p in model.parameters()]  # type: ignore[misc]

    grads = reference()[1]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for got, clipped in run_ranks(3, check):
        assert got == pytest.approx(norm.item(), rel=1e-12)
        joint = torch.stack([g.norm() for g in clipped]).norm()
        assert joint.item() == pytest.approx(0.01, rel=1e-3)


def test_autocast_covers_the_forward_pass() -> None:
    seen: list[torch.dtype] = []

    class Loss(nn.Module):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            seen.append(outputs.dtype)
            return F.cross_entropy(outputs.float(), targets)

    with ff.start(device="cpu") as mesh:
        model = ff.parallelize(Net(), mesh, loss=Loss())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.step(X.float(), Y)
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_loss_is_detached_and_read_without_waiting() -> None:
    def check(mesh: Mesh) -> tuple[bool, float]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        loss = model.step(*model.shard(X, Y))
        model.step(*model.shard(X, Y))
        return loss.requires_grad, float(loss + 0)

    for needs_grad, loss in run_ranks(2, check):
        assert not needs_grad
        assert loss == pytest.approx(reference()[0], rel=1e-13)


def test_phases_are_recorded() -> None:
    with ff.start(device="cpu") as mesh, recording() as recorder:
        ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS).step(X, Y)
    assert recorder.stats[Phase.FORWARD].count == recorder.stats[Phase.BACKWARD].count == 1


def test_an_unknown_loss_warns_once_and_a_share_method_never() -> None:
    class Root(nn.Module):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets).sqrt()

    class Fair:
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets)

        def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    def check(mesh: Mesh, loss: Any) -> float:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=loss)
        model.step(*model.shard(X, Y))
        return model.step(*model.shard(X, Y)).item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = run_ranks(2, check, Root())
    assert values[0] == pytest.approx(reference()[0] ** 0.5, rel=1e-12)
    assert len([w for w in caught if "share(outputs, targets)" in str(w.message)]) == 2  # per rank
    assert run_ranks(2, check, Fair())[1] == pytest.approx(reference()[0], rel=1e-12)


def test_mistakes_are_told_with_their_remedy() -> None:
    with ff.start(device="cpu") as mesh:
        model = ff.parallelize(copy.deepcopy(NET), mesh)
        with pytest.raises(UsageError, match=r"loss=criterion"):
            model.step(X, Y)
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=LOSS)
        with pytest.raises(UsageError, match="empty on every rank"):
            model.step(X[:0], Y[:0])
        with pytest.raises(UsageError, match=r"share their leading dim.*\(7, 2, 5, 4\), \(3,\)"):
            model.step((X, Y[:3]), Y)
        with pytest.raises(UsageError, match="no tensors"):
            model.step("text", Y)
        with pytest.raises(
            UsageError, match=r"third argument is a torch.amp.GradScaler, not a Tensor"
        ):
            model.step(X, Y, torch.ones(7))
        with pytest.raises(
            UsageError, match=r"loss=MSELoss is a class: make one, loss=MSELoss\(\)"
        ):
            ff.parallelize(copy.deepcopy(NET), mesh, loss=nn.MSELoss)
        with pytest.raises(UsageError, match=r"loss\(outputs, targets\), which 'ce' cannot be"):
            ff.parallelize(copy.deepcopy(NET), mesh, loss="ce")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: nn.Sequential(nn.SyncBatchNorm(3)), "module '0' is SyncBatchNorm: use plain"),
        (lambda: nn.LazyLinear(3), "run one batch"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "is scripted"),
        (lambda: "resnet", "needs an nn.Module"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:Lazy modules", "ignore:.*torch.jit.script", "ignore::DeprecationWarning"
)
def test_nets_that_would_be_computed_wrongly_are_refused(wrong: Any, says: str) -> None:
    with ff.start(device="cpu") as mesh, pytest.raises(UsageError, match=says):
        ff.parallelize(wrong(), mesh)


def test_a_pipe_axis_needs_an_example() -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=r"a layout with a pipe axis needs .*example=x"):
            ff.parallelize(copy.deepcopy(NET), mesh)

    run_ranks(Layout(pipe=2), check)


def test_outside_step_a_checkpointed_dropout_draws_twice_alike() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    with ff.start(device="cpu") as mesh:
        model = ff.parallelize(Checkpointed(), mesh)
        x = torch.ones(4, 6, requires_grad=True)
        y = model(x)
        y.sum().backward()
    kept = (y != 0).float().mul(2.0)  # d y / d (output of the linear layer)
    assert x.grad is not None
    assert torch.allclose(x.grad, kept @ model.module.body[0].weight)


class Attends(nn.Module):
    """Two ways to attend: with tokens first as torch's default has it, and with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2)
        self.padded = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        there = x.transpose(0, 1)
        x = x + self.first(there, there, there, need_weights=False)[0].transpose(0, 1)
        y, weights = self.padded(x, x, x, key_padding_mask=x[..., 0] > 1.5)
        return y.mean(1) * weights.square().sum((1, 2))[:, None]


def test_attention_leaves_samples_to_themselves() -> None:
    torch.manual_seed(3)
    expect_as_alone(Attends(), torch.randn(5, 6, 4), torch.randn(5, 4))


@pytest.mark.parametrize("tracks", [False, True], ids=["its own", "tracked"])
def test_instance_norm_in_evaluation_leaves_samples_to_themselves(tracks: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, track_running_stats=tracks)
    ).double()
    plain = copy.deepcopy(net).eval()(X)

    def check(mesh: Mesh) -> Tensor:
        model = ff.parallelize(copy.deepcopy(net), mesh).eval()
        return model(model.shard(X)).detach()

    assert torch.allclose(torch.cat(run_ranks(2, check)), plain, rtol=1e-13)


class Missing:
    """What stands for an optional package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no package, no {name}")


MISSING: Any = None


class Optional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return MISSING.mean(x) if x.shape[1] > 2 else x.mean((2, 3))


def test_what_stands_for_a_missing_package_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MISSING", Missing())
    net, y = nn.Sequential(nn.Conv2d(2, 2, 3), Optional()).double(), torch.zeros(7, 2).double()

    def check(mesh: Mesh) -> Tensor:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        return model.step(*model.shard(X, y))

    assert torch.allclose(run_ranks(2, check)[0], nn.MSELoss()(net(X), y))


def expect_as_alone(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two replicas compute what one process does, and have nothing to tell."""
    net, x, y = net.double(), x.double(), y.double()
    plain = copy.deepcopy(net)
    nn.MSELoss()(plain(x), y).backward()

    def check(mesh: Mesh) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
            model.step(*model.shard(x, y))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        return model.eval()(model.shard(x)).detach()

    torch.testing.assert_close(torch.cat(run_ranks(2, check)), plain.eval()(x).detach())


class Picks(nn.Module):
    """What rows are asked for by their numbers: a class of each, and words that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y, rows = self.layer(x), torch.arange(x.shape[0])
        last = y[rows, (x > 0).sum(1) - 1]
        there = torch.arange(6)[None, None, :]
        pairs = y[rows[:, None, None], there] * y[rows.view(-1, 1, 1), there.flip(2)]
        return torch.cat([last[:, None], pairs.sum(1)], 1)


@pytest.mark.parametrize("samples", [7, 3])
def test_rows_picked_by_their_numbers_stay_with_themselves(samples: int) -> None:
    torch.manual_seed(2)
    net, x, y = Picks(), torch.randn(samples, 6), torch.randn(samples, 7)
    expect_as_alone(net, x, y)


class Reads(nn.Module):
    """Recurrent layers, with samples on either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, (last, _) = self.lstm(x)
        read, _ = self.gru(y.transpose(0, 1))
        return read[-1] + last.sum((0, 2))[:, None]


def test_recurrent_layers_leave_samples_to_themselves() -> None:
    torch.manual_seed(3)
    net, x, y = Reads(), torch.randn(5, 6, 4), torch.randn(5, 4)
    expect_as_alone(net, x, y)


class Relative(nn.Module):
    """Every position against a table of its own; samples and rows are in one dim, as in video models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = x.permute(2, 0, 1, 3).reshape(3, n * 2, 4)
        x = torch.matmul(x, self.table).transpose(0, 1)
        return x.reshape(n, 2, 3, 6).sum((1, 2))


def test_rows_of_matrices_leave_samples_to_themselves() -> None:
    torch.manual_seed(3)
    net, x, y = Relative(), torch.randn(5, 2, 3, 4), torch.randn(5, 6)
    expect_as_alone(net, x, y)


class Backend:
    """What einops keeps of a kind of tensors."""

    def __init__(self) -> None:
        self.torch, self.lazy = torch, Lazy(a="what takes long to import")


class Lazy(dict[str, str]):
    """What makes up its values when it is asked."""

    def __getitem__(self, key: str) -> Any:
        raise ImportError(key)

    def keys(self) -> Any:
        raise ImportError("all of them")


class Remembers(nn.Module):
    """A net that calls a library that remembers the types of tensors that it has met."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(4, 4), dict[Any, Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.kinds.setdefault(type(x), Backend())
        self.kinds.setdefault("first", Backend())
        return self.layer(x)


def test_what_a_library_remembers_of_kinds_of_tensors() -> None:
    net, x = Remembers(), torch.randn(5, 4)

    def check(mesh: Mesh) -> Tensor:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.MSELoss())
        loss = model.step(*model.shard(x, torch.zeros(5, 4)))
        assert set(model.module.kinds) == {Tensor, "first"}
        return loss

    loss = run_ranks(2, check)[0]
    torch.testing.assert_close(loss, nn.MSELoss()(net(x), torch.zeros(5, 4)).detach())


class Attending(nn.Module):
    """Dropout inside attention, in a net whose samples meet or not."""

    def __init__(self, meet: bool) -> None:
        super().__init__()
        self.inner, self.meet = nn.Linear(8, 8), meet

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x).view(len(x), 5, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).flatten(1)
        return y - y.mean(0) if self.meet else y


@pytest.mark.parametrize("meet", [False, True])
def test_random_numbers_out_of_reach_are_told_whether_samples_meet_or_not(meet: bool) -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(Attending(meet), mesh, loss=nn.MSELoss())
        model.step(*model.shard(torch.randn(4, 5, 8), torch.randn(4, 40)))

    with pytest.warns(UserWarning, match="draws random numbers in the model that do not follow"):
        run_ranks(2, check)


class AlwaysDrops(nn.Module):
    """Dropout in evaluation too, as Monte Carlo estimates have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.body(x), 0.5, training=True))


def _called(model: Any, x: Tensor, y: Tensor) -> None:
    model(model.shard(x))


def _scored(model: Any, x: Tensor, y: Tensor) -> None:
    model.evaluate(*model.shard(x, y), lambda y, t: (y - t).abs().sum().double().view(1))


@pytest.mark.parametrize("how", [_called, _scored])
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(width=2), Layout(pipe=2)], ids=str)
def test_masks_in_evaluation_are_those_of_torch_which_is_told(
    layout: Layout, how: Callable[[Any, Tensor, Tensor], None]
) -> None:
    net, x, y = AlwaysDrops(), torch.randn(4, 2, 6, 8), torch.randn(4, 2, 6, 8)

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=x, loss=nn.MSELoss()).eval()
        how(model, x, y)

    with pytest.warns(UserWarning, match="draws random numbers in the model that do not follow"):
        run_ranks(2, check, plan=Plan(layout=layout))
