from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fivefold.data import Cursor
from fivefold.train.progress import Bar, Progress, ProgressLines, Silent, suited
from fivefold.train.summary import EpochReport, Summary

REPORT = EpochReport(
    epoch=3, step=36, images=1000, learning_rate=0.1, loss=0.25, test_loss=0.5, accuracy=0.975,
    images_per_s=1234.5, epoch_s=2.0, phases_s={"forward": 0.5, "backward": 1.0, "validate": 0.3},
)  # fmt: skip


def shown(terminal: bool) -> tuple[Progress, io.StringIO]:
    # An empty environment: what CI or a pager set must not decide what a test sees.
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=100, _environ={"TERM": "xterm-256color"}
    )
    return suited(console), out


def play(progress: Progress) -> None:
    with progress as p:
        p.begin(step=24, steps=120, epochs=10)
        p.step(Cursor(epoch=2, batch=5, step=30), loss=0.3, images_per_s=1200.0)
        p.epoch(REPORT)


def test_lines_where_the_output_is_no_terminal():
    progress, out = shown(terminal=False)
    assert isinstance(progress, ProgressLines)
    play(progress)
    assert out.getvalue() == (
        "epoch  3/10  step 30  loss 0.300  1,200 images/s\n"
        "epoch  3/10  loss 0.250  test accuracy 0.975  1,234 images/s\n"
    )


def test_an_epoch_that_another_process_trained_has_no_loss():
    progress, out = shown(terminal=False)
    progress.begin(step=24, steps=120, epochs=10)
    progress.epoch(replace(REPORT, images=0, loss=None, images_per_s=0.0))
    assert out.getvalue() == "epoch  3/10  trained before  test accuracy 0.975\n"
    assert Summary.of([replace(REPORT, images=0, images_per_s=0.0), REPORT]).images_per_s == 1234.5


def test_lines_where_a_launcher_passes_the_output_on():
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(suited(console, "openmpi"), ProgressLines)
    assert isinstance(suited(console, "torchrun"), Bar)


def test_a_bar_with_epoch_speed_loss_and_time_left_on_a_terminal():
    progress, out = shown(terminal=True)
    assert isinstance(progress, Bar)
    with progress as p:
        p.begin(step=24, steps=120, epochs=10)
        p.step(Cursor(epoch=2, batch=5, step=30), loss=0.3, images_per_s=1200.0)
        progress._bar.refresh()
        drawn = out.getvalue()
        p.epoch(REPORT)
    for part in ("epoch 3/10", "━", "1,200 images/s", "loss 0.300", "left"):
        assert part in drawn
    assert "epoch  3/10  loss 0.250  test accuracy 0.975" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h"), "cursor hidden"


def test_the_cursor_comes_back_when_training_fails():
    progress, out = shown(terminal=True)
    try:
        with progress as p:
            p.begin(step=0, steps=10, epochs=1)
            raise RuntimeError
    except RuntimeError:
        pass
    assert out.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.getvalue()


def test_a_step_is_due_only_every_few_seconds(monkeypatch):
    monkeypatch.setattr(ProgressLines, "every_s", 3600.0)
    progress, _ = shown(terminal=False)
    progress.begin(step=0, steps=10, epochs=1)
    assert not progress.due()
    monkeypatch.setattr(ProgressLines, "every_s", 0.0)
    progress.begin(step=0, steps=10, epochs=1)
    assert progress.due()


def test_other_ranks_are_silent_and_never_read_the_loss():
    silent = Silent()
    play(silent)
    assert not silent.due()


def test_the_summary_in_words():
    summary = Summary.of([REPORT, REPORT])
    assert summary.lines() == [
        "test accuracy  0.975 after 2 epochs",
        "throughput     1,234 images/s; 2,000 in 4.0 s",
        "time           forward 25%  backward 50%  validate 15%  other 10%",
    ]
