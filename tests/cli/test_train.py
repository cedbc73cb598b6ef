"""`fivefold train` as it is typed, with real processes.

Each start of ranks costs seconds: they are few, and shared.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import CLEAN, programs
from fivefold import recipes
from fivefold.plan import Plan
from fivefold.recipes import models
from full_disk import on_full_disk, refusal

BIN = Path(sys.executable).parent
ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1"}


def fivefold(folder: Path, *words: str, before: tuple[str, ...] = (), **options):
    options = {"capture_output": True, "text": True, "env": ENVIRON} | options
    # In namespaces of its own, not in those of what is forked elsewhere, where there is something before.
    command = [*before, str((BIN if before else programs()) / "fivefold"), "train", *words]
    return subprocess.run(command, cwd=folder, timeout=100, check=False, **options)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(home) -> subprocess.CompletedProcess[str]:
    done = fivefold(home, "digits", "-n", "2", "--epochs", "3", "--set", "numerics.seed=1")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_lines_tell_the_epochs_and_the_outcome(first):
    lines = first.stdout.splitlines()
    assert first.stderr == ""
    assert "\x1b" not in first.stdout, "no escape codes in a file"
    heading, *rest = lines
    assert heading.startswith(
        "digits: resnet20 on 1,437 images, tested on 360; 2 processes (data=2"
    )
    epochs = [line for line in rest if line.startswith("epoch") and "test accuracy" in line]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    assert [line.split()[0] for line in lines[-4:]] == ["test", "throughput", "time", "written"]
    assert "runs/digits-001: metrics.jsonl, plan.toml, trace, weights.pt" in lines[-1]


def test_the_run_directory_is_complete(first, home):
    run = home / "runs" / "digits-001"
    assert sorted(p.name for p in run.iterdir()) == [
        "logs", "metrics.jsonl", "plan.toml", "trace", "weights.pt",
    ]  # fmt: skip
    assert sorted(p.name for p in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert [p.name for p in home.iterdir()] == ["runs"], "nothing else is left behind"
    plan = Plan.load(run / "plan.toml")
    assert plan.layout.data == 2
    assert [str(plan.origin(f"train.{key}")) for key in ("epochs", "batch_size", "momentum")] == [
        "user: --epochs", "recipe: digits", "default",
    ]  # fmt: skip
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_weights_reach_the_reported_accuracy_in_plain_torch(first, home):
    run = home / "runs" / "digits-001"
    net = models.build("resnet20", classes=10, channels=1)
    net.load_state_dict(torch.load(run / "weights.pt", weights_only=True))
    _, test = recipes.get("digits").images(None)
    images = torch.stack([image for image, _ in test])
    with torch.no_grad():
        found = net.eval()(images).argmax(1) == torch.tensor(test.labels)
    reported = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
    assert reported > 0.15, "three epochs teach more than chance"
    # Validation may have run in bfloat16: a few images near a border are judged differently.
    assert found.double().mean().item() == pytest.approx(reported, abs=0.02)


@pytest.mark.long
def test_under_mpirun_and_with_the_plan_of_an_earlier_run(first, home):
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    mpirun = Path(sysconfig.get_path("scripts")) / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun in this environment; pip install -e '.[mpi]' brings it")
    plan = home / "runs" / "digits-001" / "plan.toml"
    done = fivefold(
        home, "digits", "--plan", str(plan), "--epochs", "1", before=(str(mpirun), *options)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to ") == 1, "one rank speaks"
    assert sorted(p.name for p in (home / "runs").iterdir()) == ["digits-001", "digits-002"]
    again = Plan.load(home / "runs" / "digits-002" / "plan.toml")
    assert again.numerics.seed == 1
    assert again.layout.data == 2


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir()
        for index in range(12):
            pixels = generator.integers(level - 30, level + 30, (20, 24, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def test_a_folder_of_pictures_on_a_terminal(pictures, tmp_path):
    reader, terminal = pty.openpty()
    try:
        done = fivefold(
            tmp_path,
            *("folder", "--data", str(pictures), "--model", "resnet20", "--size", "16"),
            *("--epochs", "2", "--batch-size", "8", "--out", "elsewhere"),
            env=ENVIRON | {"TERM": "xterm-256color", "COLUMNS": "100"},
            capture_output=False, stdout=terminal, stderr=subprocess.PIPE,
        )  # fmt: skip
        shown = os.read(reader, 65536).decode()
    finally:
        os.close(terminal)
        os.close(reader)
    assert done.returncode == 0, done.stderr
    assert "━" in shown, "a bar"
    assert "\x1b[?25h" in shown, "and the cursor is back"
    assert "epoch 2/2  loss " in shown
    assert (tmp_path / "elsewhere" / "folder-001" / "weights.pt").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digts"], "unknown recipe 'digts'; did you mean 'digits'? Valid: digits, cifar10, svhn"),
        (
            ["cifar10"],
            "the recipe cifar10 needs --data DIR; DIR holds data_batch_1 to data_batch_5",
        ),
        (["digits", "-n", "0"], "-n 0: at least 1 process is needed"),
        (["digits", "-n", "2", "--model", "resnet19"], "unknown model 'resnet19'; did you mean"),
        (["folder", "--data", "DATA", "-n", "2"], "half.png"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(pictures, tmp_path, words, message):
    broken = tmp_path / "broken"
    for name in ("dark", "light"):
        (broken / name).mkdir(parents=True)
        whole = (pictures / name / "0.png").read_bytes()
        (broken / name / "half.png").write_bytes(whole[: len(whole) // 2])
    work = tmp_path / "work"
    work.mkdir()
    done = fivefold(work, *(str(broken) if word == "DATA" else word for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert list(work.iterdir()) == [], "nothing half-written"


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    (full := tmp_path / "full").mkdir()
    train = f"cd .. && {sys.executable} -m fivefold train digits -n 1 --out full/out"
    done = on_full_disk(full, ["sh", "-c", train], ENVIRON)
    assert done.returncode == 2, done.stderr
    assert (
        "cannot write the run's full/out/digits-001/plan.toml: No space left on device"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_weights_that_a_full_disk_does_not_take_are_named(tmp_path: Path) -> None:
    (full := tmp_path / "full").mkdir()
    script = (
        "import torch; from pathlib import Path; from fivefold.train.run import RunDirectory\n"
        "RunDirectory(Path('.'), writes=True).save_weights({'w': torch.zeros(1 << 16)})\n"
    )
    done = on_full_disk(full, [sys.executable, "-c", script], ENVIRON)
    said = done.stderr.splitlines()[-1]
    assert "UsageError: cannot write the run's weights.pt: No space left on device" in said
    assert [line for line in done.stdout.splitlines() if "left: " in line] == ["left: filling"]
