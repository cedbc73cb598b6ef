"""`fivefold train --checkpoint`: a recipe that is stopped by a signal and goes on."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from commands import CLEAN, programs
from waiting import awaited

ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1", "FIVEFOLD_LEASE_S": "3"}


def pictures(folder: Path) -> None:
    """Two classes that differ in their brightness."""
    draw = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for index in range(12):
            pixels = draw.integers(level - 30, level + 30, (36, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


RECIPES = {
    "digits": ["--epochs", "2"],
    "folder": [
        "--data", "pictures", "--model", "resnet50", "--size", "32", "--epochs", "5", "--batch-size", "4",
    ],
    "photos": ["--size", "12", "--epochs", "2"],
}  # fmt: skip


def start(
    folder: Path, recipe: str, *words: str, ranks: int = 2, forked: bool = True
) -> subprocess.Popen[str]:
    home = programs() if forked else Path(sys.executable).parent
    command = [
        str(home / "fivefold"), "train", recipe, "-n", str(ranks), *RECIPES[recipe],
        "--set", f"checkpoint.local={folder / 'local'}", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in ("folder", "photos"))],
)
def test_a_recipe_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, recipe: str) -> None:
    """Classes of digits, ResNet-50 on images of one's own, and EDSR, whose pictures are divided."""
    pictures(tmp_path / "pictures")
    through = start(tmp_path, recipe, "--out", "through")
    out, err = through.communicate(timeout=100)
    assert through.returncode == 0, err
    first = start(tmp_path, recipe, "--checkpoint", "saved")
    end = time.monotonic() + 100
    while not (tmp_path / "runs" / f"{recipe}-001" / "metrics.jsonl").exists():  # after an epoch
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=100)
    assert first.returncode == 75, out + err
    assert "note: the run ended with code 75" in err and "error:" not in err
    second = start(tmp_path, recipe, "--checkpoint", "saved")
    out, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    assert "going on after step " in out
    wanted, got = (
        torch.load(tmp_path / where / "weights.pt", weights_only=True)
        for where in (f"through/{recipe}-001", f"runs/{recipe}-002")
    )
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.long
def test_a_recipe_whose_saves_are_lost_begins_again_when_it_is_told_to(tmp_path: Path) -> None:
    words = ["--epochs", "1", "--checkpoint", "saved", "--set", "checkpoint.every_steps=5"]
    done = start(tmp_path, "digits", *words, ranks=1)
    out, err = done.communicate(timeout=100)
    assert done.returncode == 0, out + err
    once_more = start(tmp_path, "digits", *words, ranks=1)
    out, err = once_more.communicate(timeout=100)
    assert once_more.returncode == 0, out + err
    assert "finished       the run in saved was trained to step 12, the end of epoch 1;" in out
    first, second = (
        torch.load(tmp_path / f"runs/digits-00{n}/weights.pt", weights_only=True) for n in (1, 2)
    )
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    shutil.rmtree(tmp_path / "local")
    for path in (tmp_path / "saved").glob("step-*"):
        shutil.rmtree(path)
    refused = start(tmp_path, "digits", *words, ranks=1)
    out, err = refused.communicate(timeout=100)
    assert refused.returncode == 2, out + err
    assert "has made saves (the last: step " in err and "--begin-again" in err
    assert "Traceback" not in err
    again = start(tmp_path, "digits", *words, "--begin-again", ranks=1)
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, out + err
    assert re.search(r"^warning        .*it begins again at step 0", out, re.MULTILINE), out


@pytest.mark.long
def test_a_rank_that_is_killed_costs_a_restart(tmp_path: Path) -> None:
    words = ["--checkpoint", "saved", "--set", "checkpoint.every_steps=5", "--restarts", "1"]
    run = start(tmp_path, "digits", *words, forked=False)
    awaited((tmp_path / "runs/digits-001/metrics.jsonl").exists, "an epoch", 100)
    ranks = psutil.Process(run.pid).children()
    next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, out + err
    assert "rank 1 of 2 was killed by SIGKILL" in err and "restart 1 of 1 now" in err
    assert "going on after step " in out
    home = tmp_path / "runs" / "digits-002"
    assert (home / "weights.pt").exists()
    for logs in (home / "logs", home / "logs" / "restart-1"):
        assert sorted(path.name for path in logs.glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
    assert not (tmp_path / "fivefold-logs").exists() and not (home / "logs" / "run").is_symlink()
