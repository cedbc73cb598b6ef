"""`fivefold tune`, as it is typed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from commands import fivefold, mistake
from fivefold.plan import Plan


def tuned(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    # It starts up to nine runs, on cores that other tests use too.
    return fivefold(
        "tune", "instances", *words, "--minutes", 0.01, cwd=folder, limit_s=550.0,
        XDG_CACHE_HOME=str(folder),
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_the_fastest_is_written_and_can_be_started(tmp_path: Path) -> None:
    words = ["resnet20", "--input", "3x8x8", "--batch", 4, "--out", "p.toml"]
    done = tuned(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "resnet20 (3x8x8), batch 4" in done.stdout and "chosen: " in done.stdout
    for change in ("twice the batch", "in bfloat16", "channels last", "changes results"):
        assert change in done.stdout
    plan = Plan.load(tmp_path / "p.toml")
    assert plan.origin("instances.per_device").kind == "tuned"
    assert "samples/s" in plan.origin("layout.data").reason
    assert plan.train.batch_size == 4
    (tmp_path / "show.py").write_text(
        "import torch, fivefold as ff\nwith ff.start() as mesh: print(mesh.size, torch.get_num_threads())"
    )
    done = fivefold("run", "--plan", "p.toml", "show.py", cwd=tmp_path)
    asked = f"{plan.layout.data} {plan.instances.threads}"
    assert done.stdout.split("] ")[-1].strip() == asked, done.stderr
    done = tuned(tmp_path, *words)
    assert "measured before, see " in done.stdout
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "fivefold.cli.trial" in (p.info["cmdline"] or ())
    ]
    assert not left


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_recipe_tries_workers(tmp_path: Path) -> None:
    done = tuned(tmp_path, "digits", "--batch", 16)
    assert "1 workers each" in done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_of_ones_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))\n"
    )
    words = ["mine:net", "--input", "3", "--integers", 9, "--batch", 2]
    done = tuned(tmp_path, *words, "--allow", "batch")
    assert "mine:net (3), batch 2" in done.stdout, done.stderr
    assert "channels last" not in done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_is_allowed_is_tried_together(tmp_path: Path) -> None:
    words = ["resnet20", "--input", "3x16x16", "--batch", 16, "--out", "p.toml"]
    done = tuned(tmp_path, *words, "--allow", "batch", "channels_last", "compile", "bfloat16")
    assert ", compiled" in done.stdout, done.stderr
    (chosen,) = (line for line in done.stdout.splitlines() if line.startswith("chosen: "))
    plan = Plan.load(tmp_path / "p.toml")
    asked = [
        ("channels last", plan.numerics.memory_format == "channels_last"),
        ("in bfloat16", plan.numerics.precision == "bfloat16"),
        ("compiled", plan.parallel.compile),
        ("twice the batch", plan.train.batch_size == 32),
    ]
    for name, there in asked:
        assert (name in chosen) == there, (chosen, name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("instances resnet21", "unknown model 'resnet21'; did you mean 'resnet20'?"),
        ("instances cifar10", "the recipe cifar10 needs --data DIR"),
        ("instances resnet20 --batch 0", "--batch 0: at least 1 is needed"),
        ("instances resnet20 --minutes 0", "--minutes 0: a positive number is needed"),
        ("instances resnet20 --allow bfloat8", "--allow bfloat8; did you mean 'bfloat16'?"),
        ("instances resnet20 --input 3xx8", "--input 3xx8 is not the shape of a sample"),
        ("instances resnet20 --out no/p.toml", "there is no folder "),
        ("instance digits", "unknown action 'instance'; did you mean 'instances'?"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, words: str, said: str) -> None:
    assert said in mistake(tmp_path, "tune", *words.split())


def test_a_model_that_cannot_be_trained_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef net(): return nn.Linear(5, 2)\n")
    words = ["mine:net", "--input", "3", "--batch", 2]
    done = tuned(tmp_path, *words)
    assert done.returncode and "cannot be multiplied" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_instances_than_samples_are_refused(tmp_path: Path) -> None:
    told = mistake(tmp_path, "train", "digits", "--instances", 2, "--set", "train.batch_size=1")
    assert "--instances 2: a batch has 1 samples" in told
