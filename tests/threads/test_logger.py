"""`ff.Logger` and `ff.progress`: figures of all ranks, told by the first."""

from __future__ import annotations

import io
import warnings
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from fivefold.trace import StepFigures
from fivefold.train import LogWriter
from ranks import run_ranks

SAMPLES, BATCH = 22, 5  # parts are uneven, and the last batch is smaller


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 6, 6, generator=generator),
        torch.randint(3, (SAMPLES,), generator=generator),
    )


def made(mesh: Mesh) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model = ff.parallelize(
        net, mesh, example=torch.empty(BATCH, 1, 6, 6, device="meta"), loss=nn.CrossEntropyLoss()
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, ff.loader(samples(), mesh, batch_size=BATCH), optim


def logged(mesh: Mesh, *writers: Any, every: int = 2) -> tuple[list[StepFigures], list[Any]]:
    """What the logger wrote on this rank, and of every step: loss, samples, own sum and count."""
    model, data, optim = made(mesh)
    told, steps = list[StepFigures](), list[Any]()
    with ff.Logger(model, told.append, *writers, every=every) as logger:
        for step, (x, y) in enumerate(data, start=1):
            loss = model.step(x, y)
            optim.step()
            optim.zero_grad()
            own = x.double().sum(), x.numel()
            logger.step(step, loss, means={"pixel": own}, rank=mesh.rank + step)
            steps.append((float(loss), model.samples, float(own[0]), own[1]))
    return told, steps


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(width=2), Layout(pipe=2)])
def test_figures_are_of_the_whole_batch(layout: Layout) -> None:
    ranks = run_ranks(layout, logged)
    told, steps = ranks[0]
    assert all(not others for others, _ in ranks[1:]), "only the first rank writes"
    assert [(f.step, f.steps) for f in told] == [(2, 2), (4, 2), (5, 1)]
    for figures in told:
        last, first = figures.step, figures.step - figures.steps
        seen = [0, *(total for _, total, _, _ in steps)]
        weights = [seen[n + 1] - seen[n] for n in range(first, last)]
        assert set(weights) <= {BATCH, SAMPLES % BATCH}
        losses = [steps[n][0] for n in range(first, last)]
        mean = sum(x * w for x, w in zip(losses, weights, strict=True)) / sum(weights)
        assert figures.loss == pytest.approx(mean, abs=1e-12)
        sums = [sum(s[n][at] for _, s in ranks for n in range(first, last)) for at in (2, 3)]
        assert figures.values["pixel"] == pytest.approx(sums[0] / sums[1], abs=1e-12)
        assert figures.values["rank"] == last, "the first rank's, as it was"
        assert figures.step_s is not None and figures.samples_per_s is not None
        timed = sum(weights) if first else weights[-1]  # not the first step of all
        count = figures.steps if first else 1
        assert figures.samples_per_s * figures.step_s * count == pytest.approx(timed)
        assert figures.phases_s["forward"] > 0 and sum(figures.phases_s.values()) < figures.step_s
        assert figures.exposed_s == {} and figures.exposed_share is None, "no trace, no waiting"


class Failing(LogWriter):
    """Fails where it is told to."""

    def __init__(self, *, at: int) -> None:
        self.at, self.steps, self.failed = at, list[int](), list[bool]()

    def open(self) -> None:
        if not self.at:
            raise PermissionError("/nowhere cannot be written to")

    def __call__(self, figures: StepFigures) -> None:
        self.steps.append(figures.step)
        if figures.step >= self.at:
            raise OSError("disk full")

    def close(self, *, failed: bool = False) -> None:
        self.failed.append(failed)


def test_a_writer_that_cannot_write_ends_all_ranks_before_the_first_step() -> None:
    def check(mesh: Mesh) -> str:
        with pytest.raises(UsageError) as told:
            logged(mesh, Failing(at=0))
        return str(told.value)

    expected = "Failing cannot write figures: /nowhere cannot be written to"
    assert run_ranks(2, check) == [expected, expected]


def test_a_writer_that_fails_is_used_no_more_and_training_goes_on() -> None:
    writers = [Failing(at=4), Failing(at=4)]

    def check(mesh: Mesh) -> list[int]:
        return [f.step for f in logged(mesh, writers[mesh.rank])[0]]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert run_ranks(2, check) == [[2, 4, 5], []]
    assert writers[0].steps == [2, 4] and writers[1].steps == []
    (said,) = (str(w.message) for w in warned if "figures" in str(w.message))
    assert said == (
        "from step 4 on, Failing gets no figures, for it failed: disk full. Training goes on"
    )


@pytest.mark.parametrize("ends", [SystemExit, RuntimeError, None])
def test_writers_hear_how_the_run_ended(ends: type[BaseException] | None) -> None:
    writer = Failing(at=100)

    def check(mesh: Mesh) -> None:
        model, data, _ = made(mesh)
        logger = ff.Logger(model, writer, every=2)
        try:
            with logger:
                for step, (x, y) in enumerate(data, start=1):
                    logger.step(step, model.step(x, y))
                    if step == 3 and ends is not None:
                        raise ends
        except (SystemExit, RuntimeError):
            pass
        logger.close()  # again

    run_ranks(1, check)
    assert writer.failed == [ends is RuntimeError]
    assert writer.steps == ([2] if ends else [2, 4, 5])


def test_means_have_the_same_names_on_all_ranks_and_in_all_steps() -> None:
    def names(mesh: Mesh) -> None:
        model, *_ = made(mesh)
        logger = ff.Logger(model, every=1)
        with pytest.raises(UsageError, match="the names of means"):
            logger.step(1, means={f"of {mesh.rank}": (1, 1)})

    run_ranks(2, names)

    def later(mesh: Mesh) -> None:
        model, *_ = made(mesh)
        logger = ff.Logger(model, every=1)
        logger.step(1, means={"a": (1, 1)})
        with pytest.raises(UsageError, match="had no mean 'b': give all means from the first step"):
            logger.step(2, means={"b": (1, 1)})
        with pytest.raises(UsageError, match="every is 0; it must be 1 or more"):
            ff.Logger(model, every=0)

    run_ranks(1, later)


# ---- progress


def shown(
    mesh: Mesh, *, terminal: bool, stop: bool = False, every: int = 1, epochs: int = 1
) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=100, _environ={"TERM": "xterm-256color"}
    )
    model, data, _ = made(mesh)
    steps = ff.progress(data, mesh, console=console)
    logger = ff.Logger(model, steps, every=every)
    try:
        for step, (x, y) in enumerate(chain(*repeat(steps, epochs)), start=1):
            logger.step(step, model.step(x, y))
            if stop:
                raise RuntimeError
    except RuntimeError:
        pass
    logger.close()
    return out.getvalue()


def test_the_first_rank_shows_a_line_where_there_is_no_terminal() -> None:
    first, second = run_ranks(2, lambda mesh: shown(mesh, terminal=False))
    assert second == ""
    (line,) = first.splitlines()
    assert line.startswith("step 5/5  loss ") and line.endswith(" samples/s")


def test_the_last_line_has_figures_that_come_after_the_loop() -> None:
    """As a logger has them that is due later, or whose messages are under way on busy cores."""
    first, _ = run_ranks(2, lambda mesh: shown(mesh, terminal=False, every=100))
    (line,) = first.splitlines()
    assert line.startswith("step 5/5  loss ") and line.endswith(" samples/s")
    first, _ = run_ranks(2, lambda mesh: shown(mesh, terminal=False, every=100, epochs=2))
    assert [line.split()[1] for line in first.splitlines()] == ["5/5", "5/5"], "one of each loop"


def test_the_first_rank_shows_a_bar_on_a_terminal() -> None:
    first, second = run_ranks(2, lambda mesh: shown(mesh, terminal=True))
    assert second == "" and "━" in first
    assert first.endswith(" samples/s\n") and "step 5/5  loss " in first, "a line stays"


def test_a_loop_that_fails_gives_the_cursor_back() -> None:
    (text,) = run_ranks(1, lambda mesh: shown(mesh, terminal=True, stop=True))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_what_has_no_length_is_counted() -> None:
    def check(mesh: Mesh) -> tuple[list[int], str]:
        console = Console(file=io.StringIO(), force_terminal=False)
        items = ff.progress((n for n in range(3)), mesh, console=console)
        return list(items), console.file.getvalue()  # type: ignore[attr-defined]

    ((found, line),) = run_ranks(1, check)
    assert found == [0, 1, 2] and line.startswith("step 3  ") and line.endswith(" steps/s\n")
