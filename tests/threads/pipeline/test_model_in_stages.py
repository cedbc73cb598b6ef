"""A model on a pipe axis as its user sees it: names, weights, evaluation, clipping, scaling, mistakes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh, part_of
from fivefold.parallel.program import costs
from fivefold.parallel.program.net import RecordedNet
from fivefold.plan import Layout, Pipeline, Plan
from ranks import run_ranks

torch.manual_seed(0)
NET = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
    nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
)  # fmt: skip
X, Y = torch.randn(8, 3, 9, 7), torch.randint(0, 5, (8,))


def started(
    mesh: Mesh, net: nn.Module = NET, loss: Callable[..., Any] | None = None
) -> ff.ParallelModel:
    return ff.parallelize(copy.deepcopy(net), mesh, example=X, loss=loss or nn.CrossEntropyLoss())


def on_pipe(check: Callable[[Mesh], Any], ranks: int = 2, **pipeline: Any) -> list[Any]:
    plan = Plan(layout=Layout(pipe=ranks), pipeline=Pipeline(**pipeline))
    return run_ranks(plan.layout, check, plan=plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_each_rank_holds_its_stages_under_the_names_of_the_net(schedule: str) -> None:
    def check(mesh: Mesh) -> tuple[set[str], set[str]]:
        model = started(mesh)
        whole = model.full_state_dict()
        assert list(whole) == list(NET.state_dict())
        assert all(torch.equal(whole[name], value) for name, value in NET.state_dict().items())
        assert {name for name, _ in model.named_parameters()} <= set(model.state_dict())
        real = {n for n, p in model.module.named_parameters() if not p.is_meta}
        assert real == {name for name, _ in model.named_parameters()}
        return set(model.state_dict()), {n for n, _ in NET.named_parameters()} - real

    (one, missing), (other, _) = on_pipe(check, schedule=schedule)
    assert one | other == set(NET.state_dict())
    assert bool(one & other) == (schedule == "gems") == (not missing)


def test_a_state_dict_of_the_plain_net_is_loaded() -> None:
    other = {name: value + 1 for name, value in NET.state_dict().items()}

    def check(mesh: Mesh) -> None:
        model = started(mesh)
        model.load_state_dict(other)
        whole = model.full_state_dict()
        assert all(torch.equal(whole[name], value) for name, value in other.items())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({n: v for n, v in other.items() if n != "0.weight"})

    on_pipe(check)


@pytest.mark.parametrize(
    "layout", [Layout(pipe=3), Layout(data=2, pipe=2), Layout(pipe=2, width=2)], ids=str
)
def test_evaluation_gives_outputs_to_all_ranks(layout: Layout) -> None:
    plain = copy.deepcopy(NET).eval()
    with torch.no_grad():
        expected = plain(X)

    def check(mesh: Mesh) -> None:
        model = started(mesh)
        with pytest.raises(UsageError, match=r"call model\.eval\(\) first"):
            model(model.shard(X))
        model.eval()
        outputs = model(model.shard(X))
        part = part_of(outputs)  # tiles may have been turned into samples
        assert part is not None
        mine = slice(part.origin[0], part.origin[0] + len(outputs))
        torch.testing.assert_close(outputs, expected[mine])

    run_ranks(layout, check)


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_gradients_are_clipped_by_the_norm_of_all(schedule: str) -> None:
    plain = copy.deepcopy(NET).double()
    outputs = torch.cat([plain(part.double()) for part in X.chunk(4)])
    nn.functional.cross_entropy(outputs, Y).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    expected = {name: p.grad for name, p in plain.named_parameters()}

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(
            copy.deepcopy(NET).double(), mesh, example=X.double(), loss=nn.CrossEntropyLoss()
        )
        model.step(*model.shard(X.double(), Y))
        torch.testing.assert_close(ff.clip_grad_norm_(model, 0.01), norm)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])

    on_pipe(check, schedule=schedule, micro_batches=4)


def test_steps_accumulate_gradients() -> None:
    def check(mesh: Mesh) -> None:
        once, twice = started(mesh), started(mesh)
        once.step(*once.shard(X, Y))
        for _ in range(2):
            twice.step(*twice.shard(X, Y))
        for one, two in zip(once.parameters(), twice.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(two.grad, 2 * one.grad)

    on_pipe(check, schedule="gems", micro_batches=4)


def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    def check(mesh: Mesh) -> None:
        model = started(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = [p.detach().clone() for p in model.parameters()]
        model.step(*model.shard(X, Y), scaler=scaler)
        if mesh.rank == 1:  # as if only the last stage had overflowed
            next(model.parameters()).grad.fill_(torch.inf)  # pyright: ignore[reportOptionalMemberAccess]
        assert model.stages is not None
        assert model.placeholder is not None
        model.stages.agree_on_overflow(model.placeholder)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        for one, other in zip(before, model.parameters(), strict=True):
            assert torch.equal(one, other)

    on_pipe(check)


def test_ranks_without_an_end_may_pass_nothing() -> None:
    def check(mesh: Mesh) -> float:
        model = started(mesh)
        x, y = model.shard(X, Y)
        return float(model.step(x if mesh.rank == 0 else None, y if mesh.rank == 2 else None))

    losses = on_pipe(check, ranks=3, schedule="gpipe", micro_batches=2)
    with torch.no_grad():
        outputs = torch.cat([copy.deepcopy(NET)(part) for part in X.chunk(2)])
    expected = nn.functional.cross_entropy(outputs, Y)
    assert losses == pytest.approx([float(expected)] * 3)


def test_ends_need_theirs() -> None:
    def check(mesh: Mesh) -> None:
        model = started(mesh)
        x, y = model.shard(X, Y)
        if mesh.rank == 0:
            with pytest.raises(UsageError, match="holds a first stage, so step needs the inputs"):
                model.step(None, y)
        else:
            with pytest.raises(UsageError, match="holds a last stage, so step needs the targets"):
                model.step(x)

    on_pipe(check)


def test_a_smaller_batch_has_fewer_micro_batches() -> None:
    def check(mesh: Mesh) -> None:
        model = started(mesh)
        model.step(*model.shard(X[:3], Y[:3]))
        with pytest.raises(
            UsageError, match=r"too small for schedule 'gems', which needs 2 micro-batches"
        ):
            model.step(*model.shard(X[:1], Y[:1]))

    on_pipe(check, schedule="gems", micro_batches=4)


class Counting(nn.Module):
    """The first buffer is changed again at the end."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.middle(self.first(x * self.seen))
        self.seen += 1
        return x * self.seen


def unlike_any(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.exp().mean() * targets.float().mean()


@pytest.mark.parametrize(
    ("net", "plan", "error", "says"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.ReLU()), {}, PlanError,
         r"can be cut at 1 places, which gives at most 2 stages, not 3: use pipe=2 or less"),
        (Counting(), {}, PlanError, r"at most 2 stages, not 3, since seen is used in several places"),
        (NET, {"cut": "3, 6, 8"}, UsageError, "names 3 modules, but 3 stages have 2 that begin one"),
        (NET, {"cut": "3, nine"}, PlanError, "pipeline.cut names 'nine', of which no call was seen"),
        (NET, {"cut": "4, 3"}, PlanError, "is not in the order of the net"),
        (NET, {"cut": "0, 3"}, PlanError, "'0' begins the net"),
        (NET, {"schedule": "gems", "micro_batches": 3}, PlanError, "even number of them, not 3"),
        (NET, {"schedule": "interleaved"}, PlanError, "needs at least 2 stages per rank"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_cut(net: nn.Module, plan: dict[str, Any], error: type, says: str) -> None:
    x = X if net is NET else torch.randn(8, 6)

    def check(mesh: Mesh) -> None:
        with pytest.raises(error, match=says):
            ff.parallelize(copy.deepcopy(net), mesh, example=x)

    on_pipe(check, ranks=3, **plan)


def test_a_loss_that_cannot_be_taken_apart() -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=r"the loss 'unlike_any' cannot be .*\"layer\""):
            started(mesh, loss=unlike_any)

    on_pipe(check)


class Known:
    """The mean over targets that are known."""

    def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        known = targets >= 0
        apart = torch.nn.functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
        return (apart * known).sum(), known.sum()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        numerator, denominator = self.share(outputs, targets)
        return numerator / denominator


class Aside(nn.Module):
    """A net with a second head, long before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aside = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        aside = self.aside(x.mean((2, 3)))
        return self.head(self.body(x).mean((2, 3))), aside


class Both(Known):
    def share(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        (main, denominator), (aside, _) = (super(Both, self).share(o, targets) for o in outputs)
        return main + 0.4 * aside, denominator


def test_a_loss_of_what_several_stages_return() -> None:
    net = Aside()
    plain = copy.deepcopy(net)
    Both()(plain(X), UNEVEN).backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, net, loss=Both())
        model.step(*model.shard(X, UNEVEN))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    on_pipe(check, cut="body.1")


UNEVEN = torch.tensor([1, -1, -1, 2, 4, 0, -1, 3])


@pytest.mark.parametrize("schedule", ["1f1b", "gems", "zero-bubble"])
@pytest.mark.parametrize("layout", [Layout(pipe=2), Layout(data=2, pipe=2)], ids=str)
def test_a_loss_that_shares_itself(schedule: Any, layout: Layout) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    plain = copy.deepcopy(net)
    expected = Known()(plain(X), UNEVEN)
    expected.backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, net, loss=Known())
        loss = model.step(*model.shard(X, UNEVEN))
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    run_ranks(layout, check, plan=Plan(layout=layout, pipeline=Pipeline(schedule, 4)))


def test_the_batch_at_once_takes_any_loss() -> None:
    plain = copy.deepcopy(NET)
    unlike_any(plain(X), Y).backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, loss=unlike_any)
        model.step(*model.shard(X, Y))
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, expected)

    on_pipe(check, schedule="layer")


def test_a_target_without_dims_is_of_all_samples() -> None:
    plain, target = copy.deepcopy(NET), torch.tensor(0.3, dtype=X.dtype)

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().mean()

    loss(plain(X), target).backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, loss=loss)
        model.step(model.shard(X), target)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    on_pipe(check, schedule="layer")


class Counts(nn.BatchNorm2d):
    """A norm that counts its batches as timm's do, in training only."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.1,
            self.eps,
        )


def test_a_stage_that_begins_with_what_is_done_in_training_only() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Counts(4), nn.Flatten(), nn.Linear(4 * 7 * 5, 5))
    plain = copy.deepcopy(net)
    plain(X)
    expected = plain.eval()(X)

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=X, loss=nn.CrossEntropyLoss())
        model.step(*model.shard(X, Y))
        torch.testing.assert_close(model.eval()(X), expected)

    on_pipe(check, cut="1", micro_batches=1)


class Limits(nn.Module):
    """Scales by the least and the largest number so far, which evaluation reads from buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(9.0))
        self.register_buffer("high", torch.tensor(-9.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low = torch.minimum(self.low, x.detach().min())
            self.high = torch.maximum(self.high, x.detach().max())
        return (x - self.low) / (self.high - self.low)


def test_a_stage_uses_what_it_holds_in_evaluation_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Limits(), nn.Conv2d(4, 4, 1))
    plain = copy.deepcopy(net)
    plain(X)
    expected = plain.eval()(X)

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(net), mesh, example=X, loss=nn.MSELoss())
        assert "sub in '1'" in str(model.stages), "behind what makes the buffers"
        model.step(*model.shard(X, torch.zeros_like(expected)))
        torch.testing.assert_close(model.eval()(X), expected)

    on_pipe(check, schedule="layer")


class Relative(nn.Module):
    """Distances of pixels, a buffer that is made anew where the size of images has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("distances", torch.zeros(1, 1), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.distances.shape[1] != x.shape[3]:
            there = torch.arange(x.shape[3], dtype=torch.float32)
            self.distances = (there - there[:, None]).abs().to(self.scale)
        return x @ torch.softmax(self.scale * self.distances, 1)


@pytest.mark.parametrize("place", [0, 2])
def test_a_buffer_that_gets_another_shape_in_one_stage(place: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)
    )
    net.insert(place, Relative())
    if place:
        net.insert(place, nn.Conv2d(3, 3, 1))
    plain = copy.deepcopy(net)
    for _ in range(2):
        nn.CrossEntropyLoss()(plain(X), Y).backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, net)
        for _ in range(2):
            model.step(*model.shard(X, Y))
        assert model.stages is not None
        every = model.stages.everywhere(dict(model.module.named_buffers()))
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(every[name], buffer)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        torch.testing.assert_close(model.eval()(X), plain.eval()(X))

    on_pipe(check)


def test_stages_begin_where_the_plan_says() -> None:
    def check(mesh: Mesh) -> set[str]:
        return {name for name, _ in started(mesh).named_parameters()}

    first, second = on_pipe(check, cut="8")
    assert second == {"8.weight", "8.bias"}
    assert "4.weight" in first


def test_stages_are_told() -> None:
    def check(mesh: Mesh) -> str:
        return str(started(mesh, loss=nn.CrossEntropyLoss()).stages)

    one, other = on_pipe(check, schedule="gpipe", micro_batches=2, cut="3")
    assert one == other
    lines = one.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "0", "conv2d"], ["1", "1", "conv2d"]]
    assert "120" in lines[1] and "181" in lines[2], "parameters"
    assert lines[4].startswith("rank 0 |F0F1")


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [Layout(pipe=2), Layout(pipe=2, width=2)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gems"])
def test_autocast_crosses_stages_in_its_dtype(layout: Layout, schedule: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                        nn.Conv2d(8, 5, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fmt: skip
    plain = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(plain(X), Y)
    loss.backward()

    def check(mesh: Mesh) -> None:
        model = started(mesh, net)
        with torch.autocast("cpu", torch.bfloat16):
            found = model.step(*model.shard(X, Y))
        torch.testing.assert_close(found, loss.detach(), rtol=0.02, atol=0.02)
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert parameter.grad is not None
            assert expected is not None
            assert (parameter.grad - expected).norm() <= 0.1 * expected.norm(), name

    plan = Plan(layout=layout, pipeline=Pipeline(schedule, 2))
    run_ranks(layout, check, plan=plan)


def test_all_ranks_plan_by_the_same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages whose plans differ would send each other tensors of other shapes than expected."""
    numbers = iter(range(1, 1000))
    monkeypatch.setattr(costs, "fastest", lambda _run: 10.0 ** -next(numbers))

    def check(mesh: Mesh) -> costs.Costs:
        return RecordedNet(copy.deepcopy(NET), mesh).costs

    found = run_ranks(Layout(data=2, pipe=2, height=2), check)
    assert found == [found[0]] * 8


@pytest.mark.parametrize("layout", [Layout(data=2, pipe=2), Layout(pipe=2)], ids=str)
def test_a_net_that_nobody_holds_any_more_is_gone(layout: Layout) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    net(X)

    def check(mesh: Mesh) -> list[weakref.ref[Tensor]]:
        model = started(mesh, net)
        model.step(*model.shard(X, Y))
        return [weakref.ref(parameter) for parameter in model.parameters()]

    found = [held for of_rank in run_ranks(layout, check) for held in of_rank]
    gc.collect()
    assert found and not [held for held in found if held() is not None]


class TwoHeads(nn.Module):
    """A head of the first stage whose output a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.second, self.main = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        aside = self.aside(x)
        return self.main(self.second(x).tanh()), aside


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = False

    def share(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        found = (outputs[0] - targets).square().sum()
        if self.both:
            found = found + (outputs[1] - targets).square().sum()
        return found, torch.tensor(float(targets.numel()))


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
@pytest.mark.parametrize("layout", [Layout(pipe=2), Layout(pipe=2, height=2)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "gems"])
def test_what_a_loss_leaves_out_has_no_gradient_on_any_stage(schedule: Any, layout: Layout) -> None:
    torch.manual_seed(3)
    net = TwoHeads().double()
    x, y = torch.randn(6, 4, 5, 3).double(), torch.randn(6, 2, 5, 3).double()

    def check(mesh: Mesh) -> list[set[str]]:
        loss = Heads()
        model = ff.parallelize(copy.deepcopy(net), mesh, example=x, loss=loss)
        found: list[set[str]] = []
        for loss.both in (False, True, False):
            model.zero_grad()
            model.step(*model.shard(x, y))
            found.append({name for name, p in model.named_parameters() if p.grad is not None})
        return found

    plan = Plan(layout=layout, pipeline=Pipeline(schedule, 2, cut="second"))
    trained = {
        f"{name}.{kind}" for name in ("first", "second", "main") for kind in ("weight", "bias")
    }
    aside = {"aside.weight", "aside.bias"}
    found = zip(*run_ranks(layout, check, plan=plan), strict=True)
    assert [set.union(*of_ranks) for of_ranks in found] == [trained, trained | aside, trained]
