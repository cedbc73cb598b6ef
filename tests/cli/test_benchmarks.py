"""The benchmarks run as their README says, only smaller, and their statistics are what they claim."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from commands import python
from nodes import refusal

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HERE = BENCHMARKS / "data-parallel"
TILES = BENCHMARKS / "tiles"
MODULES = ("contender", "contenders", "figures", "publishing", "rounds", "report")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The benchmark's own modules: beside their script, as it finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "common"))
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def measured(
    folder: Path, *options: str, script: Path = HERE / "run.py", timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), str(script), "--results", str(folder), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.long
def test_two_contenders_take_turns_and_end(tmp_path: Path) -> None:
    small = ["--batch=8", "--image=8", "--steps=1", "--rounds=7", "--startup=0"]
    done = measured(tmp_path, "--variants=fp32", *small, "--contenders", "ddp", "exact")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "8px-8-fp32.json").read_text())
    assert {name: len(rates) for name, rates in result["images_per_s"].items()} == {
        "ddp": 7,
        "exact": 7,
    }
    assert result["threads"] == {"ddp": 1, "exact": 1}
    assert "fivefold run, exact" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_compiled_steps_take_turns_with_others(tmp_path: Path) -> None:
    script = BENCHMARKS / "compile" / "run.py"
    small = ["--nets=tiny", "--layouts=data=2", "--rounds=7"]
    done = measured(tmp_path, *small, script=script, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "tiny.json").read_text())["found"]["data=2"]
    assert {name: len(own) for name, own in found["seconds"].items()} == {
        "as it is": 7, "compiled": 7, "torch alone, compiled": 7,
    }  # fmt: skip
    assert "### tiny, (4, 3, 32, 32), compiled" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "nodes can be made")
def test_collectives_between_nodes_are_timed_beside_gloo(tmp_path: Path) -> None:
    done = measured(tmp_path, "--parts=tiny", "--rounds=7", script=BENCHMARKS / "nodes" / "run.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "tiny.json").read_text())["found"]
    assert len(found) == 2 * 2 * 3 and all(len(seconds) == 7 for seconds in found.values())
    assert "### 2 nodes x 1, 1 Gbit/s" in done.stdout


@pytest.mark.long
def test_the_script_of_memory_on_gpus_runs(tmp_path: Path) -> None:
    words = ["--device=cpu", "--minutes=0.5", "--rounds=1", "--left=1", "--nets=edsr", "--times=1"]
    script = str(BENCHMARKS / "memory" / "gpu.py")
    done = subprocess.run(
        [python(), script, *words], check=False, capture_output=True, text=True, timeout=110, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a CPU, which tells nothing" in done.stdout
    assert "### edsr, (4, 3, 64, 64)" in done.stdout
    assert "### ResNet-50, one image, 1 GiB left" in done.stdout
    assert "memory.budget" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_instances_on_cores_are_measured(tmp_path: Path) -> None:
    script = str(BENCHMARKS / "share" / "cpus.py")
    words = ["--tiny", "--rounds=7", "--parts", "copy", "resnet20-32-replica", "--results=out"]
    done = subprocess.run(
        [python(), script, *words],
        check=False, capture_output=True, text=True, timeout=280, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held = json.loads((tmp_path / "out" / "copy.json").read_text())["held_bytes"]
    assert held["own"] == 2 * held["one"]
    assert held["shared"] <= 1.02 * held["one"] and held["shared-4"] <= 1.02 * held["one"]
    found = json.loads((tmp_path / "out" / "resnet20-32-replica.json").read_text())
    assert set(found["step_s"]) == {"one", "shared", "own", "apart"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_the_tuner_chooses_is_measured_anew(tmp_path: Path) -> None:
    script = str(BENCHMARKS / "share" / "choice.py")
    words = ["--tiny", "--minutes=0.01", "--parts", "resnet20-32-replica", "--results=out"]
    done = subprocess.run(
        [python(), script, *words],
        check=False, capture_output=True, text=True, timeout=280, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out" / "choice.json").read_text())["settings"].values()
    assert found["chosen"] in found["rates"]
    assert all(len(rates) == 7 for rates in found["rates"].values())


def test_a_contender_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    done = measured(tmp_path, "--variants=fp32", "--model=resnet21", "--startup=0", "--rounds=1")
    assert done.returncode == 1
    assert done.stderr.count("error: one process alone") == 1
    assert "did you mean 'resnet20'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_few_rounds_are_not_kept(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    modules["report"].keep({"rounds": 6}, "fp32", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_interval_holds_the_median_as_often_as_it_says(modules: dict[str, ModuleType]) -> None:
    draw = random.Random(0)
    for n in (7, 9, 21):
        claimed = modules["figures"].Median.of([draw.random() for _ in range(n)]).coverage
        medians = (
            modules["figures"].Median.of([draw.expovariate(1.0) for _ in range(n)])
            for _ in range(4000)
        )
        held = statistics.mean(m.low <= 0.6931 <= m.high for m in medians)
        assert claimed >= 0.95
        assert held == pytest.approx(claimed, abs=0.012)


def test_a_goal_is_met_by_the_whole_interval(modules: dict[str, ModuleType]) -> None:
    median = modules["figures"].Median
    assert median(1.0, 0.98, 1.01, 0.96).at_least(0.98) == "met"
    assert median(1.0, 0.97, 1.01, 0.96).at_least(0.98).startswith("open")
    assert median(0.9, 0.88, 0.97, 0.96).at_least(0.98) == "missed"
    assert median(1.0, 0.9, 1.15, 0.96).at_most(1.15) == "met"
    assert median(1.2, 1.16, 1.3, 0.96).at_most(1.15) == "missed"
    assert median(1.0, 1.0, 1.0, 0.75).at_least(0.98).startswith("too few")


def test_every_contender_computes_after_every_other(modules: dict[str, ModuleType]) -> None:
    rounds = [modules["rounds"].order("abcde", number) for number in range(10)]
    assert all(sorted(order) == list("abcde") for order in rounds)
    assert {order[0] for order in rounds} == set("abcde")
    follows = {pair for order in rounds for pair in itertools.pairwise(order)}
    assert {(a, b) for a, b in follows if a < b} and {(a, b) for a, b in follows if a > b}


def test_the_readme_shows_what_the_results_say(modules: dict[str, ModuleType]) -> None:
    text = (HERE / "README.md").read_text()
    assert modules["report"].renewed(text, HERE / "results") == text


def test_tiles_and_one_process_take_turns(tmp_path: Path) -> None:
    small = ["--parts=throughput", "--model=edsr_small", "--features=2", "--image=16", "--rounds=7"]
    two = ["--contenders", "one-thread", "tiles"]
    done = measured(tmp_path, *small, *two, script=TILES / "run.py")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "edsr_small-2-features-16px.json").read_text())
    assert {name: len(times) for name, times in result["step_s"].items()} == {
        "one-thread": 7,
        "tiles": 7,
    }
    assert result["threads"] == {"one-thread": 1, "tiles": 1}
    assert "fivefold run, width=2" in done.stdout


def test_live_bytes_are_those_that_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TILES))
    live = __import__("live").Live()
    sys.modules.pop("live")
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(True), nn.Conv2d(2, 1, 3, padding=1))
    x = torch.randn(1, 1, 8, 8)
    net(x).sum().backward()
    with live, live.noting_backward():
        net(x).sum().backward()
    # Both activations (the rectified one is the same storage), of which the last is not saved; the sum.
    assert live.saved_bytes == 4 * (2 * 64 + 1)
    assert live.peak_bytes > live.saved_bytes
    assert live.bytes == 0


def test_the_readme_of_tiles_shows_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (BENCHMARKS / "common", TILES):
        monkeypatch.syspath_prepend(str(folder))
    text = (TILES / "README.md").read_text()
    assert __import__("report").renewed(text, TILES / "results") == text
    for name in ("contender", "contenders", "figures", "publishing", "report"):
        sys.modules.pop(name, None)
