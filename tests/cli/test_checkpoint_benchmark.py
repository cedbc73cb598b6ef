"""The benchmark of checkpoints runs as its README says, only smaller; its throttle slows what it should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from commands import python
from nodes import refusal

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HERE = BENCHMARKS / "checkpoint"
MODULES = (
    *("contender", "contenders", "costs", "epochs_report", "figures", "publishing", "report"),
    "throttle",
)
FAST = 200e6
NEEDS_CC = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The benchmark's own modules: beside their script, as it finds them."""
    for name in MODULES:
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(BENCHMARKS / "common"))
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@NEEDS_CC
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}")
def test_a_part_is_measured_and_kept(tmp_path: Path) -> None:
    small = ["--parts=replicated", "--rounds=7", "--layers=1", "--quiet=2", "--steps=3"]
    small += ["--disk-mib=512", f"--results={tmp_path}"]
    contenders = ["none", "rank0", "dcp-staged", "xor", "xor-flushed"]
    done = subprocess.run(
        [python(), str(HERE / "run.py"), *small, "--contenders", *contenders],
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "replicated.json").read_text())
    assert {name: len(rounds) for name, rounds in kept["blocks"].items()} == dict.fromkeys(
        contenders, 7
    )
    # One layer: a matrix and a bias, both with two moments and a count of steps.
    assert kept["state_bytes"] == 3 * 4 * (2048 * 2048 + 2048) + 2 * 4
    assert "### replicated: 2 nodes, 50 MB of state" in done.stdout and "too few" not in done.stdout


@NEEDS_CC
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}")
def test_ways_back_are_measured(tmp_path: Path) -> None:
    small = ["--rounds=1", "--layers=1", f"--results={tmp_path}"]
    done = subprocess.run(
        [python(), str(HERE / "recovery.py"), *small],
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "### recovery: 4 nodes, 50 MB of state" in done.stdout
    assert "not kept" in done.stdout


@NEEDS_CC
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}")
@pytest.mark.parametrize("model", ["resnet50", "edsr"])
def test_epochs_are_measured(model: str, tmp_path: Path) -> None:
    small = [f"--models={model}", "--rounds=1", "--steps=2", f"--results={tmp_path}"]
    done = subprocess.run(
        [python(), str(HERE / "epochs.py"), *small],
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    state = {"resnet50": "192 MB", "edsr": "16 MB"}[model]
    assert f"2 nodes, {state} of state" in done.stdout
    assert "not kept" in done.stdout


def test_encoding_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [python(), str(HERE / "encode.py"), "--mb=1", "--rounds=1", f"--results={tmp_path}"],
        capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "BENCHMARK_PATIENCE_S": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "### encode: 8 members with 1 MB each" in done.stdout and "| rs, P and Q" in done.stdout
    assert "not kept" in done.stdout


def test_lm_resiliency_is_found_where_it_was_installed(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    contenders = modules["contenders"]
    assert "--target DIR" in contenders.missing("lm-resiliency", tmp_path)
    (tmp_path / "lm_resiliency").mkdir()
    assert not contenders.missing("lm-resiliency", tmp_path)
    found = contenders.kinds(2, 64, 1e6, tmp_path)
    assert found["lm-resiliency"].environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert not found["xor"].environ  # a plugin of it would load into every rank


@pytest.mark.long
@NEEDS_CC
@pytest.mark.parametrize("way", ["torch.save", "copy", "buffered", "direct"])
def test_what_passes_is_counted_and_takes_its_time(
    way: str, modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20_000_000))
    ways = {
        "copy": f"import shutil; shutil.copyfile({str(source)!r}, folder + '/x')",
        "torch.save": "import torch; torch.save(torch.zeros(5_000_000), folder + '/x')",
        "buffered": "open(folder + '/x', 'wb').write(bytes(20_000_000))",
        "direct": "import os; os.write(os.open(folder + '/x', os.O_CREAT | os.O_WRONLY), bytes(20_000_000))",
    }
    folder = tmp_path / "slow"
    folder.mkdir()
    throttle = modules["throttle"].Throttle(tmp_path, FAST)
    read = "; import sys; sys.exit(len(open(folder + '/x', 'rb').read()) < 20_000_000)"
    begun = time.monotonic()
    subprocess.run(
        [python(), "-c", f"folder = {str(folder)!r}; {ways[way]}{read}"],
        env={**os.environ, **throttle.variables(folder)}, check=True, timeout=60,
    )  # fmt: skip
    written, got = throttle.passed
    assert 20_000_000 <= written < 20_010_000
    assert 20_000_000 <= got < 20_010_000
    assert time.monotonic() - begun > 40_000_000 / FAST


@NEEDS_CC
def test_what_lies_elsewhere_is_left_alone(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    throttle = modules["throttle"].Throttle(tmp_path, 1.0)
    for name in ("slow", "slower"):
        (tmp_path / name).mkdir()
    write = f"open({str(tmp_path / 'slower' / 'x')!r}, 'wb').write(bytes(100))"
    variables = {**os.environ, **throttle.variables(tmp_path / "slow")}
    subprocess.run([python(), "-c", write], env=variables, check=True, timeout=60)
    assert throttle.passed == (0, 0)
    assert throttle.operations == 0


@NEEDS_CC
def test_operations_on_paths_are_counted(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    throttle = modules["throttle"].Throttle(tmp_path, 1e12)
    folder = tmp_path / "shared"
    folder.mkdir()
    calls = {
        "open('x', 'w')": 1,
        "open('x').read()": 1,
        "os.stat('x')": 1,
        "os.path.exists('absent')": 1,
        "os.listdir('.')": 1,
        "os.symlink('x', 'y'); os.readlink('y')": 1,
        "[one.stat() for one in os.scandir('.')]": 3,
        "os.access('x', os.R_OK)": 1,
    }
    for call, count in calls.items():
        words = re.sub(r"'(x|y|\.|absent)'", lambda found: repr(str(folder / found[1])), call)
        throttle.reset()
        variables = {**os.environ, **throttle.variables(folder)}
        subprocess.run(
            [python(), "-c", f"import os; {words}"], env=variables, check=True, timeout=60
        )
        assert throttle.operations == count, call


def test_a_cost_is_what_a_save_adds(modules: dict[str, ModuleType]) -> None:
    quiet = {"wall_s": 2.0, "cpu_s": 5.0, "step_s": [0.5] * 4}
    saved = {"wall_s": 3.75, "cpu_s": 10.0, "step_s": [0.5] * 6, "call_s": 0.1}
    costs = modules["costs"]
    cost = costs.of_blocks({"quiet": quiet, "saved": saved}, 2)
    assert (cost.stall_s, cost.cpu_s) == (pytest.approx(0.75), pytest.approx(3.0))
    # Either the clock or the processors, never both: what helpers take from training is in the stall.
    assert cost.processor_s == pytest.approx(1.5)
    assert cost.whole_s == pytest.approx(1.5)
    assert costs.Cost(2.0, 3.0, 2).whole_s == pytest.approx(2.0)
    assert costs.Cost(-0.1, -0.2, 2).whole_s == 0.0
    # Young: T = sqrt(2 C M), C / T = sqrt(C / 2 M)
    assert costs.Cost(0.72, 0.0, 2).at_best() == pytest.approx(0.01)
    assert costs.Cost(0.72, 0.0, 2).interval_s() == pytest.approx(72.0)


def test_one_of_ten_is_flushed(modules: dict[str, ModuleType]) -> None:
    costs = modules["costs"]
    mixed = costs.mixed(costs.Cost(0.1, 0.2, 2), costs.Cost(1.1, 2.2, 2))
    assert (mixed.stall_s, mixed.cpu_s) == (pytest.approx(0.2), pytest.approx(0.4))
    epochs = {
        name: [{"wall_s": wall}] * 7
        for name, wall in (("none", 10.0), ("rank0", 11.0), ("xor", 10.1), ("xor-flushed", 10.6))
    }
    wall = modules["epochs_report"].series(epochs, "wall_s")
    assert wall["tenth"] == pytest.approx([10.15] * 7)
    assert modules["epochs_report"].shares(wall, "rank0").value == pytest.approx(0.1)


def test_the_readme_shows_what_the_results_say(modules: dict[str, ModuleType]) -> None:
    text = (HERE / "README.md").read_text()
    assert modules["report"].PAGE.renewed(text, HERE / "results") == text
    assert all(f"| {title}" in text for title in modules["contenders"].TITLES.values())
