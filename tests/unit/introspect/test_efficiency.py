"""Throughput beside one process times ranks: measured, estimated, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UsageError
from fivefold.introspect.compare import compared
from fivefold.introspect.document import document
from fivefold.introspect.efficiency import beside_each_other, beside_one
from fivefold.introspect.run import TracedRun
from fivefold.introspect.shape import Document
from traces import MS, Story

_PLAN = {
    "train.batch_size": {"value": 128, "origin": "default"},
    "train.epochs": {"value": 1, "origin": "user"},
    "comm.backend": {"value": "auto", "origin": "default"},
}


def made(folder: Path, name: str = "run", **told: Any) -> Document:
    story = Story(**told)
    return document(TracedRun.load(story.write(folder / name)))


def test_one_process_is_estimated_from_the_work_of_the_ranks(tmp_path: Path) -> None:
    # 53 ms of work (20 forward, 30 backward, 3 update, a fifth to load) and 20 of exposed reduction.
    told = made(tmp_path, ranks=4, transfer_ns=20 * MS)["throughput"]
    assert told["one_process_from"] == "estimated"
    assert told["one_process_run"] is None
    assert told["one_process_samples_per_s"] == pytest.approx(32 / 53.2e-3, rel=0.01)
    assert told["expected_samples_per_s"] == pytest.approx(4 * 32 / 53.2e-3, rel=0.01)
    assert told["ratio"] == pytest.approx(53.2 / 73.2, rel=0.01)


def test_missing_ranks_do_not_slow_a_run_down(tmp_path: Path) -> None:
    whole = made(tmp_path, ranks=4)["throughput"]
    (tmp_path / "run" / "trace" / "rank-00002.trace").unlink()
    told = document(TracedRun.load(tmp_path / "run"))["throughput"]
    assert told["samples_per_s"] == pytest.approx(whole["samples_per_s"], rel=0.01)
    assert told["ratio"] == pytest.approx(whole["ratio"], rel=0.01)


def test_one_process_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    told = made(tmp_path, ranks=1)["throughput"]
    assert told["samples_per_s"]
    assert told["one_process_from"] is None and told["ratio"] is None


def test_no_samples_no_figure(tmp_path: Path) -> None:
    story = Story(ranks=2)
    story.samples[:] = 0
    told = document(TracedRun.load(story.write(tmp_path)))["throughput"]
    assert set(told.values()) == {None}


def test_tiles_of_a_sample_are_one_sample(tmp_path: Path) -> None:
    layout = {"data": 2, "pipe": 1, "depth": 1, "height": 1, "width": 2}
    found = made(tmp_path, meta={"layout": layout})
    assert found["throughput"]["samples_per_step"] == 64
    step_s = found["steady"]["step_s"] if found["steady"] else 0
    assert found["throughput"]["samples_per_s"] == pytest.approx(64 / step_s, rel=1e-3)
    assert found["series"]["samples_per_s"][5] == pytest.approx(64 / step_s, rel=0.05)


def test_a_run_of_one_process_measures_it(tmp_path: Path) -> None:
    run = made(tmp_path, ranks=4, transfer_ns=20 * MS, meta={"plan": _PLAN})
    alone = made(tmp_path, "alone", ranks=1, transfer_ns=0, meta={"plan": _PLAN})
    found = beside_one(run, alone)
    told = found["throughput"]
    assert told["one_process_from"] == "measured"
    assert told["one_process_run"] == str(tmp_path / "alone")
    assert told["one_process_samples_per_s"] == alone["throughput"]["samples_per_s"]
    assert told["ratio"] == pytest.approx(53.2 / 73.2, rel=0.02)
    assert found["problems"] == run["problems"], "nothing is configured otherwise"
    assert run["throughput"]["one_process_from"] == "estimated", (
        "the report that was given is unchanged"
    )


def test_another_configuration_is_told(tmp_path: Path) -> None:
    run = made(tmp_path, ranks=4, meta={"plan": _PLAN, "threads": 2})
    plan = _PLAN | {
        "train.batch_size": {"value": 64, "origin": "user"},
        "train.epochs": {"value": 9, "origin": "user"},
        "comm.backend": {"value": "gloo", "origin": "user"},
    }
    alone = made(tmp_path, "alone", ranks=1, meta={"plan": plan})
    assert beside_one(run, alone)["problems"] == [
        f"the one process of {tmp_path / 'alone'} was configured otherwise: train.batch_size, threads"
    ]


def test_scripts_are_told_apart_by_their_words(tmp_path: Path) -> None:
    run = made(tmp_path, ranks=2, meta={"command": ["python3.11", "train.py", "--deep"]})
    same = made(
        tmp_path, "same", ranks=1, meta={"command": ["python3", "-u", "train.py", "--deep"]}
    )
    other = made(tmp_path, "other", ranks=1, meta={"command": ["python3", "train.py"]})
    assert beside_one(run, same)["problems"] == run["problems"]
    assert "the script's command line" in beside_one(run, other)["problems"][-1]


def test_only_a_run_of_one_process_that_counts_samples_will_do(tmp_path: Path) -> None:
    run = made(tmp_path, ranks=4)
    with pytest.raises(
        UsageError, match="run has 4 ranks: what one process does is measured in a run of"
    ):
        beside_one(run, run)
    story = Story(ranks=1)
    story.samples[:] = 0
    silent = document(TracedRun.load(story.write(tmp_path / "silent")))
    with pytest.raises(UsageError, match="silent does not say how many samples a step has"):
        beside_one(run, silent)


def test_of_two_runs_the_one_of_one_process_does_for_the_other(tmp_path: Path) -> None:
    run = made(tmp_path, ranks=4, transfer_ns=20 * MS, meta={"plan": _PLAN})
    alone = made(tmp_path, "alone", ranks=1, transfer_ns=0, meta={"plan": _PLAN})
    for pair in ((run, alone), (alone, run)):
        a, b = beside_each_other(*pair)
        rows = {row["name"]: row for row in compared(a, b)["figures"]}
        row = rows["of one process times ranks"]
        of_ranks, of_one = (row["a"], row["b"]) if pair[0] is run else (row["b"], row["a"])
        assert of_ranks == pytest.approx(0.727, rel=0.02)
        assert of_one is None
    other = made(tmp_path, "other", ranks=1, meta={"plan": {}})
    for pair in ((run, other), (run, run)):
        a, b = beside_each_other(*pair)
        assert "of one process times ranks" not in {
            row["name"] for row in compared(a, b)["figures"]
        }
