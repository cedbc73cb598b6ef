"""The proof itself: it passes what is exact, and it fails what is not, whatever is wrong."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel
from fivefold.plan import Layout, Parallel, Plan
from fivefold.recipes import models
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks
from zoo import CLASSES, Call, Case, Then, run

REPLICA = Parallel(batch_norm="replica")


def failing(case: Case, ranks: int = 2, samples: int = 6, plan: Plan | None = None) -> Report:
    report = run(case, ranks, samples, plan=plan)
    assert not report.passed
    assert report.verdict().startswith("NOT exact: ")
    return report


def resnet20(ranks: int, dtype: torch.dtype, plan: Plan | None = None) -> list[Report]:
    torch.manual_seed(1)
    net = models.build("resnet20")
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))) for _ in range(2)]

    def check(mesh: Mesh) -> Report:
        loss = nn.CrossEntropyLoss()
        return verify(
            lambda: copy.deepcopy(net),
            mesh,
            loss=loss,
            batch=batches.__getitem__,
            steps=2,
            dtype=dtype,
        )

    return run_ranks(ranks, check, plan=plan)


# ---- what is exact passes


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_real_model_is_exact_and_every_rank_knows(ranks: int) -> None:
    reports = resnet20(ranks, torch.float64)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report.passed
    assert report.verdict().startswith(
        f"exact: CifarResNet under data={ranks} equals one process (largest error "
    )
    assert [q.name for q in report.quantities] == [
        "loss", "outputs", "gradients", "buffers", "weights",
    ]  # fmt: skip
    # Nowhere near the tolerance, and not zero either: something was compared.
    assert all(0 < q.worst[0].error < 1e-12 for q in report.quantities[1:])
    assert all(0 < q.worst[0].own < 1e-12 for q in report.quantities[1:])


def test_in_float32_the_yardstick_is_one_process_in_float32() -> None:
    report = resnet20(3, torch.float32)[0]
    assert report.passed
    gradients = report.quantities[2].worst[0]
    assert gradients.error > 1e-8
    assert gradients.tolerance == max(4 * 2.0**-23, 2 * gradients.own)


def test_one_process_alone_equals_itself() -> None:
    report = run(Case(lambda: Then(nn.BatchNorm2d(6))), 1, 5)
    assert report.passed
    assert all(item.error < 1e-14 for item in report.worst)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reentrant_checkpoints_are_exact(ranks: int) -> None:
    from torch.utils.checkpoint import checkpoint

    inner = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Dropout(0.3))
    case = Case(lambda: Then(Call(lambda self, x: checkpoint(self.inner, x, use_reentrant=True),
                                  inner=inner)))  # fmt: skip
    assert run(case, ranks, 5).passed


class Hooked(nn.Module):
    """Hooks and closures that a copy would share with the original, or lose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        scale = torch.linspace(1, 2, 6)
        self.first.register_forward_hook(lambda _m, _x, y: y * scale)
        self.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.second = lambda x: self.last(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def vectors(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    return x, torch.randint(4, (7,), generator=draw)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hooks_and_closures_of_both_sides_are_their_own(dtype: torch.dtype) -> None:
    def check(mesh: Mesh) -> Report:
        return verify(Hooked, mesh, loss=nn.CrossEntropyLoss(), batch=vectors, dtype=dtype)

    assert run_ranks(3, check)[0].passed


def test_a_loss_that_is_made_with_its_net_may_have_a_penalty() -> None:
    def build() -> tuple[nn.Module, Callable[..., Tensor]]:
        net = Hooked()

        class Penalised(nn.CrossEntropyLoss):
            def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                rows = torch.tensor(len(targets))
                penalty = sum(p.square().sum() for p in net.parameters())
                cost = nn.functional.cross_entropy(outputs, targets, reduction="sum")
                return cost + 0.1 * rows * penalty, rows

            def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
                numerator, denominator = self.share(outputs, targets)
                return numerator / denominator

        return net, Penalised()

    def check(mesh: Mesh) -> Report:
        return verify(build, mesh, loss=None, batch=vectors)

    report = run_ranks(2, check)[0]
    assert report.passed, report


def test_a_net_instead_of_what_builds_it_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="verify builds the net twice"):
            verify(Hooked(), mesh, loss=nn.CrossEntropyLoss(), batch=vectors)

    run_ranks(1, check)


# ---- what is not exact fails


def test_statistics_of_each_replica_fail_and_the_drifting_buffer_is_named() -> None:
    report = resnet20(2, torch.float64, Plan(layout=Layout(data=2), parallel=REPLICA))[0]
    assert not report.passed
    assert all(not q.passed for q in report.quantities)
    assert report.replicas.difference > 1e-3
    assert "running_" in report.replicas.where
    assert report.replicas.where.endswith("(buffers) of rank 1")


def wrong_step(change: Callable[[ParallelModel], None]) -> Callable[..., Tensor]:
    right = ParallelModel.step

    def step(self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        loss = right(self, *args, **kwargs)
        change(self)
        return loss

    return step


def scale_one_gradient(model: ParallelModel) -> None:
    next(p for n, p in model.named_parameters() if n == "head.bias").grad.mul_(1 + 1e-8)  # type: ignore[union-attr]


def test_one_gradient_that_is_a_little_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelModel, "step", wrong_step(scale_one_gradient))
    report = failing(Case(lambda: Then(nn.BatchNorm2d(6))))
    loss, outputs, gradients, buffers, weights = report.quantities
    assert loss.passed and outputs.passed and buffers.passed
    assert gradients.worst[0].name == weights.worst[0].name == "head.bias"
    assert gradients.worst[0].error == pytest.approx(1e-8, rel=1e-3)
    assert all(item.excess < 0.1 for item in gradients.worst[1:])
    assert "in head.bias, tolerance" in report.verdict()


def test_a_rank_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: ParallelModel) -> None:
        if model._mesh.rank == 2:
            scale_one_gradient(model)

    monkeypatch.setattr(ParallelModel, "step", wrong_step(change))
    report = failing(Case(lambda: Then(nn.Identity())), ranks=3)
    assert all(q.passed for q in report.quantities)  # rank 0 is right
    assert report.replicas.where == "head.bias (gradients) of rank 2"
    assert "replicas differ by" in report.verdict()


def test_a_missing_gradient_is_not_a_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: ParallelModel) -> None:
        next(p for n, p in model.named_parameters() if n == "head.bias").grad = None

    monkeypatch.setattr(ParallelModel, "step", wrong_step(change))
    report = failing(Case(lambda: Then(nn.Identity())))
    assert math.isinf(report.worst[0].error)
    assert report.worst[0].name == "head.bias"


def over_the_batch(_self: Call, x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


class Counting(nn.Module):
    """A buffer of one's own that every rank fills from its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return x


APART = Plan(layout=Layout(data=2), parallel=Parallel(rows="apart"))


def test_operations_over_the_batch_are_exact_and_fail_where_they_are_vouched_for() -> None:
    case = Case(lambda: Then(Call(over_the_batch)))
    assert run(case, 2, 6).passed
    report = failing(case, plan=APART)
    assert not report.quantities[1].passed


def test_integer_buffers_must_be_equal() -> None:
    assert run(Case(lambda: Then(Counting())), 2, 6).passed
    report = failing(Case(lambda: Then(Counting())), plan=APART)
    assert [q.name for q in report.quantities if not q.passed] == ["buffers"]
    assert report.worst[0].name == "middle.seen"


def test_a_reference_that_fails_late_is_told_on_all_ranks() -> None:
    batch = torch.randn(6, 3, 8, 8), torch.randn(6, CLASSES)
    rank_0_builds: list[int] = []

    def check(mesh: Mesh) -> str:
        def build() -> nn.Module:
            if mesh.rank == 0:
                rank_0_builds.append(1)
                # In float64, in float32 and on the layout; then to see how far one process goes astray.
                if len(rank_0_builds) > 3:
                    raise OSError("the file of weights is gone")
            return Then(Call(over_the_batch))

        with pytest.raises(UsageError) as told:
            verify(
                build, mesh, loss=nn.MSELoss(), batch=lambda _: batch, steps=2, dtype=torch.float32
            )
        return str(told.value)

    for told in run_ranks(2, check, plan=APART):
        assert told.startswith("one process alone could not train the model again: OSError")
        assert "the file of weights is gone" in told


@pytest.mark.filterwarnings("ignore:randn draws random numbers in the model")
def test_random_numbers_beyond_control_fail_with_a_hint() -> None:
    noisy = Call(lambda _, x: x * torch.randn(x.shape, dtype=x.dtype))
    report = failing(Case(lambda: Then(noisy)))
    assert "the warning '... draws random numbers in the model ...'" in report.notes[0]


def test_the_same_random_numbers_are_no_difference_in_one_process() -> None:
    noisy = Call(lambda _, x: x * torch.randn(x.shape, dtype=x.dtype))
    assert run(Case(lambda: Then(noisy)), 1, 5).passed


# 6 channels: a multiple of a rank's samples, or not.
@pytest.mark.parametrize("samples", [4, 6, 10])
def test_masks_over_another_leading_dim_are_told_and_fail_with_a_hint(samples: int) -> None:
    drop = nn.Dropout(0.4)
    turned = Call(lambda self, x: self.drop(x.transpose(0, 1)).transpose(0, 1), drop=drop)
    with pytest.warns(UserWarning, match="whose leading dim is not the samples"):
        report = failing(Case(lambda: Then(turned)), ranks=2, samples=samples)
    assert "where these are on the leading dim" in report.notes[0]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_said_and_never_passes() -> None:
    undefined = Call(lambda _, x: x / 0.0 * 0.0)
    report = failing(Case(lambda: Then(undefined)))
    assert report.notes[0].startswith("the reference itself gives NaN or infinity: ")
    assert report.notes[1].startswith("the layout gives NaN or infinity: ")
    assert report.figures()["quantities"][0]["worst"][0]["error"] is None


def test_what_is_not_a_sample_is_left_out_and_said() -> None:
    class Sum(nn.Module):
        def forward(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs[0], targets)

        def share(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
            each = nn.functional.cross_entropy(outputs[0], targets, reduction="sum")
            return each, torch.tensor(float(len(targets)))

    aside = Call(lambda self, x: (self.net(x), x.detach().abs().max()), net=Then(nn.Identity()))
    report = run(Case(lambda: aside, loss=Sum()), 3, 7)
    assert report.passed
    assert [item.name for item in report.quantities[1].worst] == ["output 0"]
    assert report.notes == (
        "not compared, because the leading dim is not the samples of the batch: output 1",
    )


# ---- what cannot be verified is said on every rank


def test_what_one_process_cannot_train_is_told_with_the_shapes() -> None:
    def check(mesh: Mesh) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(5, 4))
        batch = (torch.randn(6, 7), torch.zeros(6, dtype=torch.int64))
        with pytest.raises(UsageError) as error:
            verify(
                lambda: copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss(), batch=lambda _: batch
            )
        assert re.match(
            r"one process alone cannot train the model on inputs of shape \(6, 7\) with targets of shape "
            r"\(6,\): RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied",
            str(error.value),
        )

    run_ranks(2, check)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": torch.bfloat16}, "float64 or float32"), ({"steps": 0}, "at least one is needed")],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=message):
            verify(lambda: nn.Linear(1, 1), mesh, loss=nn.MSELoss(), batch=lambda _: (), **options)

    run_ranks(1, check)
