"""`Validator` without helpers: the mesh evaluates, and results come when they are due."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import fivefold as ff
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state import Captured
from fivefold.checkpoint.state_adapter import StateEntry
from fivefold.checkpoint.values import fingerprint
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.offload import BestSoFar, Result, Validator
from fivefold.offload.snapshot import Packing, Snapshot
from fivefold.parallel import gathering
from fivefold.plan import Layout, Numerics
from fivefold.train.task import CLASSES, PICTURES
from ranks import run_ranks
from sharding import plan_of


def data(pictures: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(7, 3, 12, 12, generator=generator)
    return TensorDataset(
        images, images * 2 if pictures else torch.randint(4, (7,), generator=generator)
    )


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def painter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))


def plain(net: nn.Module, pictures: bool, numerics: Numerics | None = None) -> list[float]:
    """The sums of batches of 2, by the net itself."""
    numerics, total = numerics or Numerics(), torch.zeros(3, dtype=torch.float64)
    layout = (
        torch.channels_last if numerics.memory_format == "channels_last" else torch.preserve_format
    )
    net = copy.deepcopy(net).eval()
    task = PICTURES if pictures else CLASSES
    columns = data(pictures).tensors
    for inputs, targets in zip(columns[0].split(2), columns[1].split(2), strict=True):
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16, numerics.precision == "bfloat16"),
        ):
            total += task.sums(net(inputs.contiguous(memory_format=layout)), targets)
    return total.tolist()


def validated(
    mesh: Mesh, net: nn.Module, pictures: bool, numerics: Numerics | None = None
) -> list[Result]:
    example = torch.empty(2, 3, 12, 12, device="meta")
    model = ff.parallelize(copy.deepcopy(net), mesh, example=example, loss=nn.CrossEntropyLoss())
    tests = ff.loader(data(pictures), mesh, batch_size=2, shuffle=False)
    task = PICTURES if pictures else CLASSES
    with Validator(
        model, tests, score=task.sums, figures=task.figures, delay=0, numerics=numerics
    ) as validator:
        return validator.submit(1, 10)


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    "layout",
    [Layout(data=3), Layout(width=3), Layout(data=2, height=2), Layout(pipe=2), Layout(pipe=2, width=2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("pictures", [False, True])
def test_every_layout_counts_every_sample_once(layout: Layout, *, pictures: bool) -> None:
    net = painter() if pictures else classifier()
    expected = plain(net, pictures)
    for (result,) in run_ranks(layout, validated, net, pictures):
        assert (result.epoch, result.step) == (1, 10)
        assert result.sums == pytest.approx(expected, rel=1e-5)
        assert result.figures["test_loss"] == pytest.approx(expected[0] / expected[2], rel=1e-5)


@pytest.mark.parametrize(
    "numerics",
    [Numerics(), Numerics(memory_format="channels_last"), Numerics(precision="bfloat16")],
    ids=str,
)
def test_one_process_gives_the_bits_of_the_net_itself(numerics: Numerics) -> None:
    net = classifier()
    ((result,),) = run_ranks(1, validated, net, False, numerics)
    assert list(result.sums) == plain(net, False, numerics)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_results_come_so_many_calls_later(delay: int) -> None:
    def check(mesh: Mesh) -> None:
        net = classifier()
        model = ff.parallelize(net, mesh)
        tests = ff.loader(data(), mesh, batch_size=2, shuffle=False)
        validator = Validator(
            model, tests, score=CLASSES.sums, figures=CLASSES.figures, delay=delay
        )
        biases: list[Tensor] = []
        came: list[list[Result]] = []
        for epoch in range(4):
            with torch.no_grad():
                net[-1].bias.fill_(float(epoch))
            biases.append(net[-1].bias.detach().clone())
            came.append(validator.submit(epoch, 10 * epoch))
            for result in came[-1]:
                assert torch.equal(result.state_dict()["5.bias"], biases[result.epoch])
            assert torch.equal(net[-1].bias, biases[-1])
        came.append(validator.finish())
        expected = [[e - delay] if e >= delay else [] for e in range(4)]
        rest = list(range(4 - delay, 4))
        assert [[r.epoch for r in results] for results in came] == [*expected, rest]
        assert validator.finish() == []

    run_ranks(2, check)


class Trained:
    """A net whose weights are a function of the epoch, and its validator."""

    def __init__(self, mesh: Mesh, net: nn.Module, delay: int) -> None:
        example = torch.empty(2, 3, 12, 12, device="meta")
        loss = nn.CrossEntropyLoss()
        self.model = ff.parallelize(copy.deepcopy(net), mesh, example=example, loss=loss)
        tests = ff.loader(data(), mesh, batch_size=2, seed=5)  # another order each time
        self.validator = Validator(
            self.model, tests, score=CLASSES.sums, figures=CLASSES.figures, delay=delay
        )
        self.began = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.within: list[dict[str, Any]] = []
        """states in the middle of the last call"""
        self.told: list[Any] = []
        self.best = BestSoFar("accuracy")

    def run(self, epochs: range) -> None:
        for epoch in epochs:
            with torch.no_grad():
                for parameter, before in zip(self.model.parameters(), self.began, strict=True):
                    parameter.copy_(before * (1 + epoch))
            self.within = []
            self.validator.between = lambda: self.within.append(self.validator.state_dict())
            self.take(self.validator.submit(epoch, 10 * epoch))

    def take(self, results: list[Result]) -> None:
        for result in results:
            weights = result.state_dict()
            self.told.append((result.epoch, result.step, result.sums, weights["5.weight"].tolist()))
            self.best.update(result)


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("layout", "shard", "delay"),
    [
        (Layout(), "no", 0),
        (Layout(), "no", 1),
        (Layout(data=2), "no", 2),
        (Layout(pipe=2), "no", 0),
        (Layout(pipe=2), "no", 1),
        (Layout(data=2), "parameters", 2),
    ],
    ids=str,
)
def test_a_resumed_run_gets_the_results_that_are_due(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, shard: str, delay: int
) -> None:
    """From a state between two calls, and from one in the middle of the last call."""
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)
    net = classifier()

    def check(mesh: Mesh) -> None:
        first, through = Trained(mesh, net, delay), Trained(mesh, net, delay)
        through.run(range(4))
        through.take(through.validator.finish())
        first.run(range(3))
        for state, step, done in (
            (first.validator.state_dict(), 20, 3),
            (first.within[-1], 10, 2),
        ):
            second = Trained(mesh, net, delay)
            second.validator.load_state_dict(state)
            assert second.validator.submitted == step
            assert second.validator.waiting == min(delay, done)
            second.told += first.told[: done - min(delay, done)]
            second.run(range(done, 4))
            second.take(second.validator.finish())
            assert second.told == through.told
        assert through.best.result is not None
        found = (found for found in through.told if found[0] == through.best.result.epoch)
        weights = through.best.result.state_dict()["5.weight"]
        assert next(found)[3] == weights.tolist(), "not those that it ended with"
        assert through.best.result.epoch < 3

    run_ranks(layout, check, plan=plan_of(shard, layout))


def test_parts_that_a_checkpoint_copies_are_overwritten_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)
    monkeypatch.setattr("fivefold.checkpoint.staging.SMALL_BYTES", 1)

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(classifier(), mesh, loss=nn.CrossEntropyLoss())
        weight = (
            next(p for p in model.module.parameters() if isinstance(p, DTensor)).detach().to_local()
        )
        snapshot, begun = Snapshot(model, Packing(model.module)), weight.clone()
        with torch.no_grad():
            weight.add_(1)
        trained = weight.clone()
        staging = Staging(at_once=False)
        copied = staging.begin(
            Captured({"weight": [StateEntry(("0",), weight, rests=True)]}, frozenset())
        )
        saver = threading.Timer(0.3, staging.copy)
        saver.start()
        with snapshot.installed():
            assert weight.equal(begun)
            saver.join()
        assert copied.parts["weight"][0].value.equal(trained)
        assert weight.equal(trained)

    run_ranks(Layout(data=2), check, plan=plan_of("parameters", Layout(data=2)))


def test_another_layout_gets_them_and_evaluates_what_helpers_had_begun() -> None:
    net = classifier()

    def saved(mesh: Mesh) -> tuple[dict[str, Any], Any]:
        trained = Trained(mesh, net, 1)
        trained.run(range(2))
        state = trained.validator.state_dict()
        trained.take(trained.validator.finish())
        return state, trained.told[-1]

    def resumed(mesh: Mesh, state: dict[str, Any]) -> Any:
        trained = Trained(mesh, net, 1)
        trained.validator.load_state_dict(state)
        trained.take(trained.validator.finish())
        return trained.told[-1]

    states, results = zip(*run_ranks(Layout(pipe=2), saved), strict=True)
    assert fingerprint(states[0]) == fingerprint(states[1]), "so that ranks may change"
    state, (epoch, step, sums, weights) = states[0], results[0]
    state["under_way"]["0"]["total"] = None  # as where helpers evaluate
    for layout in (Layout(), Layout(pipe=2), Layout(width=2)):
        for found in run_ranks(layout, resumed, state):
            assert found == (epoch, step, pytest.approx(sums, rel=1e-5), weights)


def test_modules_are_left_in_the_mode_they_were_in() -> None:
    def check(mesh: Mesh) -> None:
        net = classifier()
        net[1].eval()  # frozen
        model = ff.parallelize(net, mesh)
        model.train()
        net[1].eval()
        tests = ff.loader(data(), mesh, batch_size=2)
        Validator(model, tests, score=CLASSES.sums, figures=CLASSES.figures).submit(0, 0)
        assert [module.training for module in net] == [True, False, True, True, True, True]

    run_ranks(1, check)


def test_what_makes_no_sense_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(classifier(), mesh)
        tests = ff.loader(data(), mesh, batch_size=2)
        with pytest.raises(UsageError, match="delay is 3"):
            Validator(model, tests, score=CLASSES.sums, figures=CLASSES.figures, delay=3)
        with pytest.raises(UsageError, match=r"score returned torch.float32 \(\)"):
            Validator(model, tests, score=lambda o, _: o.sum(), figures=dict).submit(0, 0)
        images = ff.loader(data().tensors[0], mesh, batch_size=2)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no pair"):
            Validator(model, images, score=CLASSES.sums, figures=dict).submit(0, 0)

    run_ranks(1, check)
