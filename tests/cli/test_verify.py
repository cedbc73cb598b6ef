"""`fivefold verify` as it is typed, with real processes: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commands import CLEAN, python

ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}

MODELS = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, noisy=False, width=12):
        super().__init__()
        self.noisy = noisy
        self.body = nn.Sequential(nn.Linear(width, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        x = self.body(x.flatten(1) + torch.zeros(12, device=x.device))
        return self.head(x + torch.randn(x.shape, device=x.device) if self.noisy else x)

class Needy(Net):
    def __init__(self, depth):
        super().__init__()

def noisy():
    return Net(noisy=True)

def broken():
    raise RuntimeError("no weights here")

class Fatal(Net):
    def forward(self, x):
        if os.environ["RANK"] == "1":
            print("my last words", flush=True)
            os._exit(7)
        return super().forward(x)

fatal = lambda: Fatal()
instance = Net()
number = 3
returns_number = lambda: 3
returns_dict = lambda: Dict()

class Dict(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory; temporary files of the command go beside it."""
    (tmp_path / "temporary").mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_models.py").write_text(MODELS)
    return home


def verify(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "fivefold", "verify", *words.split()],
        cwd=folder,
        env=ENVIRON | {"TMPDIR": str(folder.parent / "temporary")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def logs(folder: Path) -> list[Path]:
    return list((folder.parent / "temporary").glob("fivefold-verify-*/rank-*.log"))


@pytest.mark.long
def test_resnet20_is_exact_with_the_answer_in_a_file_too(folder: Path) -> None:
    # Three ranks with eight samples, and float32: docs/how-to/verify-a-model.md, which is run as well.
    done = verify(folder, "resnet20 --layout data=2 --batch 7 --input 3x16x16 --json report.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith(
        "exact: resnet20 under data=2 equals one process (largest error "
    )
    report = json.loads((folder / "report.json").read_text())
    assert report["passed"]
    errors = {q["name"]: q["worst"][0]["error"] for q in report["quantities"]}
    assert all(0 < error < 1e-12 for error in errors.values())
    assert report["replicas"]["difference"] == 0
    assert not logs(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["my_models.py", "report.json"]


@pytest.mark.long
def test_replica_statistics_fail_with_a_table_and_the_worst_parameters(folder: Path) -> None:
    done = verify(folder, "resnet20 --batch-norm replica --input 3x8x8 --json report.json")
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("NOT exact: resnet20 under data=2 differs from one process (")
    assert sum(": error " in line for line in lines) == 5
    assert any(line.startswith("replicas") and "rank 1" in line for line in lines)
    assert not json.loads((folder / "report.json").read_text())["passed"]


@pytest.mark.long
def test_a_model_of_ones_own_with_dropout_and_fewer_samples_than_ranks(folder: Path) -> None:
    done = verify(folder, "my_models:Net --input 3x2x2 --batch 2 --layout data=3 --seed 5")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_uncontrolled_random_numbers_fail_and_the_warning_is_shown(folder: Path) -> None:
    done = verify(folder, "my_models:noisy --input 12 --loss mse --steps 1")
    assert done.returncode == 1, done.stderr
    assert (
        "note: the model draws random numbers that do not follow the global sample" in done.stdout
    )
    assert "note: warning: randn draws random numbers in the model" in done.stdout


def test_a_rank_that_dies_is_named_and_its_log_is_kept(folder: Path) -> None:
    done = verify(folder, "my_models:fatal --input 12")
    assert done.returncode == 7
    assert "rank 1 of 2 exited with code 7" in done.stderr
    assert "my last words" in done.stderr
    kept = logs(folder)
    assert len(kept) == 2
    assert str(kept[0].parent) in done.stderr


@pytest.mark.long
def test_one_process_needs_no_ranks(folder: Path) -> None:
    done = verify(folder, "my_models:instance --layout data=1 --input 12 --loss bce_with_logits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: my_models:instance under data=1" in done.stdout


@pytest.mark.long
def test_another_launcher_may_start_the_ranks(folder: Path) -> None:
    before = (python(), "-m", "fivefold", "run", "-n", "2", "--log-dir", "logs", "-m")
    done = subprocess.run(
        [*before, "fivefold", "verify", "my_models:Net", "--input", "12"],
        cwd=folder,
        env=ENVIRON,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exact: my_models:Net under data=2") == 1


# Told before any rank is started; the last ones need torch, so they run as one process.
MISTAKES = {
    "resnet21": "unknown model 'resnet21'; did you mean 'resnet20'? Valid: resnet20,",
    "my_models:": "'my_models:' lacks a name after the colon; a model is one of",
    "resnet20 --layout dta=2": "unknown axis 'dta' in layout 'dta=2'; did you mean 'data'?",
    "resnet20 --batch 0": "--batch 0: at least 1 is needed",
    "resnet20 --steps 0": "--steps 0: at least 1 is needed",
    "resnet20 --input 3x32y": "--input 3x32y is not the shape of a sample; write positive numbers",
    "unet3d": "--input 3x32x32 is no volume, but unet3d takes volumes: channels, depth, height and width",
    "resnet20 --dtype float16": "--dtype float16 cannot be verified; did you mean 'float64'?",
    "resnet20 --loss my_models:": "unknown loss 'my_models:'",
    "resnet20 --targets likewise": "--targets is for a loss of your own; cross_entropy has its own targets",
    "resnet20 --loss my_models:loss --targets class": "unknown --targets class; did you mean 'classes'?",
    "resnet20 --integers -1": "--integers -1: at least 0 is needed",
    "resnet20 --loss mze": "unknown loss 'mze'; did you mean 'mse'? Valid: cross_entropy,",
    "resnet20 --batch-norm globe": "parallel.batch_norm = 'globe' is not",
    "resnet20 --json none/report.json": "--json none/report.json: there is no folder",
}
NEEDING_TORCH = {
    "resnet20 --input 3x32": "one process alone cannot run the model on an input of shape (8, 3, 32) in "
    "float64: RuntimeError: Given groups=1, weight of size [16, 3, 3, 3]",
    "my_models:Needy": "my_models:Needy needs arguments (depth): name a function without arguments",
    "my_models:broken": "my_models:broken() failed: RuntimeError: no weights here",
    "my_models:number": "my_models:number is no model but of type int",
    "my_models:returns_number": "my_models:returns_number() did not return a torch.nn.Module",
    "my_models:returns_dict --input 12": "the model returns a value of type dict",
    "my_models:nosy": "my_models has no 'nosy'; did you mean 'noisy'?",
    "no_models:Net": "there is no module 'no_models': it has to be installed, or lie in the working",
    "my_models:Net --input 12 --batch 1": "one process alone cannot run the model on an input of shape "
    "(1, 12) in float64: ValueError: Expected more than 1 value per channel",
}


def assert_one_line(done: subprocess.CompletedProcess[str], start: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {start}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long(every=8)
@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(folder: Path, words: str) -> None:
    assert_one_line(verify(folder, words), MISTAKES[words])
    assert [p.name for p in folder.iterdir()] == ["my_models.py"]


@pytest.mark.long
def test_mistakes_that_only_a_rank_can_see_are_told_once(folder: Path) -> None:
    done = verify(folder, "resnet20 --layout pipe=2 --set pipeline.cut=layer9 --input 3x8x8")
    assert_one_line(done, "pipeline.cut names 'layer9', of which no call was seen")
    assert not logs(folder)


def test_mistakes_in_models(folder: Path) -> None:
    """In one process each would import torch once more."""
    script = (
        "import sys\nfrom fivefold.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    code = main(['verify', *words.split(), '--layout', 'data=1'])\n"
        "    print(code, flush=True)\n"
    )
    done = subprocess.run(
        [python(), "-c", script, *NEEDING_TORCH],
        cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["2"] * len(NEEDING_TORCH), done.stderr
    for line, (words, start) in zip(done.stderr.splitlines(), NEEDING_TORCH.items(), strict=True):
        assert line.startswith(f"error: {start}"), words


def test_a_torchvision_that_does_not_work_is_told_in_one_line(folder: Path) -> None:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("raise RuntimeError('no operator nms')")
    done = verify(folder, "torchvision:resnet18 --layout data=1")
    assert_one_line(done, "torchvision does not work beside torch ")
    assert "(RuntimeError: no operator nms): pip install 'torchvision==0." in done.stderr


@pytest.mark.long
def test_integers_and_a_loss_of_ones_own(folder: Path) -> None:
    (folder / "tokens.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 5))\n"
        "class Quartic(nn.Module):\n"
        "    def forward(self, y, t): return ((y - t) ** 4).mean()\n"
        "number = 3\n"
    )
    words = "tokens:build --input 6 --integers 9 --batch 5"
    done = verify(folder, f"{words} --loss tokens:Quartic --targets likewise")
    assert done.returncode == 0 and "exact: tokens:build under data=2" in done.stdout, done.stderr
    done = verify(folder, "tokens:build --input 6 --batch 5")
    assert done.returncode == 2 and "--integers N gives it whole numbers below N" in done.stderr
    done = verify(folder, f"{words} --loss tokens:number")
    assert done.returncode == 2 and "--loss tokens:number is of type int" in done.stderr
