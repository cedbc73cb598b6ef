"""`fivefold plan` as it is typed: what it prints, the plan that it writes, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from commands import CLEAN, python
from fivefold import Plan, recipes
from fivefold.cli.train import Train, resolve
from full_disk import on_full_disk, refusal

ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}

CLUSTER = """
name = "four boxes"
nodes = 4
devices_per_node = 2
device = {memory = "1GiB", flops_per_s = 1e13, bytes_per_s = 1e12}
within = {latency_s = 1e-5, bytes_per_s = 1e11}
between = {latency_s = 1e-4, bytes_per_s = 1e10}
"""


def plan(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "fivefold", "plan", *words.split()],
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_plan_for_devices_that_are_not_here(tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    done = plan(
        tmp_path, "resnet20 --input 3x64x64 --batch 16 --cluster boxes.toml --out plan.toml"
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "resnet20, 16 samples of 3x64x64, on 8 devices of four boxes: predictions, nothing was trained"
    )
    assert lines[1] == "A simulation of devices that are not here, from these figures:"
    assert "10,000 GFLOP/s" in lines[2] and "100 us and 10.0 GB/s between nodes" in lines[2]
    assert lines[-1] == "written to plan.toml" and lines[-2].endswith("slower in any case.")
    chosen = Plan.load(tmp_path / "plan.toml")
    assert chosen.layout.size == 8 and chosen.train.batch_size == 16
    assert str(chosen.layout) in lines[4]
    assert str(chosen.origin("layout.data")).startswith("tuned: predicted ")
    # What `fivefold train cifar10 --plan plan.toml` makes of it.
    options = Train("cifar10", plan=tmp_path / "plan.toml")
    resolved = resolve(options, recipes.get("cifar10"), {})
    assert (resolved.layout, resolved.pipeline) == (chosen.layout, chosen.pipeline)
    assert resolved.train.batch_size == 16 and resolved.origin("layout.data").kind == "tuned"


def test_a_plan_within_a_budget(tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    words = "resnet20 --input 3x64x64 --batch 16 --cluster boxes.toml --devices 1"
    done = plan(tmp_path, f"{words} --memory 70MiB --out plan.toml")
    assert (done.returncode, done.stderr) == (0, "")
    heading, row, why, counts, _ = done.stdout.splitlines()[3:]
    assert heading.split() == ["layout", "schedule", "micro-batches", "recompute", "step", "memory"]
    assert row.split()[-5:-3] == ["by", "budget"] and row.endswith("70MiB")
    assert why.startswith("data=1, within budget: computing ") and "computing again" in why
    assert counts.startswith("2 candidates: 0 impossible, 1 larger than 70MiB, 1 simulated")
    chosen = Plan.load(tmp_path / "plan.toml")
    assert (chosen.memory.budget, chosen.memory.recompute) == ("70MiB", 0)
    assert str(chosen.origin("memory.budget")).startswith("tuned: predicted ")
    options = Train("cifar10", plan=tmp_path / "plan.toml")
    assert resolve(options, recipes.get("cifar10"), {}).memory == chosen.memory


@pytest.mark.long
def test_a_plan_for_this_machine_with_operations_timed(tmp_path: Path) -> None:
    done = plan(tmp_path, "resnet20 --input 3x32x32 --batch 2 --devices 1 --measure")
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 1 devices of this machine: predictions" in done.stdout
    assert "A simulation" not in done.stdout and "steps timed here" in done.stdout
    assert "data=1" in done.stdout


def _refused_on_meta() -> bool:
    """Whether torch says without computing that an embedding takes whole numbers, as it does from 2.13 on."""
    try:
        F.embedding(torch.rand(1, device="meta"), torch.rand(1, 1, device="meta"))
    except RuntimeError:
        return True
    return False


def test_a_plan_for_a_net_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    (tmp_path / "tokens.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 5))\n"
    )
    words = "tokens:build --input 6 --batch 4 --devices 2 --cluster boxes.toml"
    if _refused_on_meta():
        done = plan(tmp_path, words)
        assert done.returncode == 2 and "--integers N gives it whole numbers below N" in done.stderr
    else:
        assert metadata.version("torch") < "2.13"
    done = plan(tmp_path, f"{words} --integers 9")
    assert (done.returncode, done.stderr) == (0, "") and "pipe=" in done.stdout


def test_nothing_fits(tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    done = plan(
        tmp_path,
        "resnet20 --input 3x64x64 --batch 2 --cluster boxes.toml --devices 2 --memory 1MiB --out plan.toml",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: no plan fits: the closest (")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("resnet21", "unknown model 'resnet21'"),
        ("resnet20 --memory lots", "--memory: 'lots' is no size of memory"),
        ("resnet20 --memory 6", "--memory: 6 has no unit; write 6GiB, 6MiB, or 6B for bytes"),
        ("resnet20 --devices 0", "--devices 0: at least 1 is needed"),
        ("resnet20 --optimizer sdg", "unknown optimizer 'sdg'; did you mean 'sgd'"),
        ("resnet20 --cluster none.toml", "cannot read the cluster none.toml"),
        ("resnet20 --cluster boxes.toml --devices 9", "--devices 9, but boxes.toml describes 4 x 2 = 8"),
        ("resnet20 --cluster boxes.toml --measure", "use one of them"),
        ("resnet20 --out no/plan.toml", "--out no/plan.toml: there is no folder"),
        ("resnet20 --input 3xx", "--input 3xx is not the shape of a sample"),
        ("unet3d --input 3x64x64", "takes volumes"),
        ("resnet20 --input 12 --cluster boxes.toml", "with a batch of shape (1, 12), the module 'conv1'"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    done = plan(tmp_path, words)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_full_disk_is_told_and_no_empty_plan_is_left(tmp_path: Path) -> None:
    (tmp_path / "boxes.toml").write_text(CLUSTER)
    (full := tmp_path / "full").mkdir()
    words = "plan resnet20 --input 3x64x64 --batch 16 --cluster boxes.toml --out plan.toml"
    command = [sys.executable, "-m", "fivefold", *words.split()]
    done = on_full_disk(full, command, ENVIRON, tmp_path / "boxes.toml")
    assert done.returncode == 2, done.stderr
    assert "error: cannot write the plan plan.toml: No space left on device; free" in done.stderr
    left = [line for line in done.stdout.splitlines() if line.startswith("left: ")]
    assert left == ["left: boxes.toml", "left: filling"]
