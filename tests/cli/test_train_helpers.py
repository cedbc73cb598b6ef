"""`fivefold train` with helpers: another way to the same run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import CLEAN, programs

WORDS = ("train", "digits", "--epochs", "2", "--set", "train.batch_size=256")
ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1"}


def trained(folder: Path, *words: str) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """What it said, its metrics, and its weights."""
    folder.mkdir()
    command = [str(programs() / "fivefold"), *WORDS, *words]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRON, timeout=110, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (run,) = (folder / "runs").iterdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    weights = torch.load(run / "weights.pt", weights_only=True)
    return done.stdout.splitlines(), [json.loads(line) for line in lines], weights


@pytest.mark.long
def test_a_run_with_helpers_is_the_same_run(tmp_path: Path) -> None:
    said, plain, weights = trained(tmp_path / "plain", "-n", "2")
    share = ("--set", "offload.share_cores=true")
    helped, found, others = trained(tmp_path / "helped", "-n", "2", "--helpers", "local:1", *share)
    assert [line["epoch"] for line in found] == [1, 2], "complete and in order"
    exact = ("epoch", "step", "images", "learning_rate", "loss", "accuracy")
    for here, there in zip(found, plain, strict=True):
        assert [here[name] for name in exact] == [there[name] for name in exact]
        # Of several ranks each evaluates a part of a batch, a helper all of it.
        assert here["test_loss"] == pytest.approx(there["test_loss"], rel=1e-5)
    assert all(torch.equal(others[name], value) for name, value in weights.items())
    epochs = [[x for x in lines if "test accuracy" in x][:2] for lines in (said, helped)]
    for one, other in zip(*epochs, strict=True):
        assert one.split("images/s")[0].split()[:-1] == other.split("images/s")[0].split()[:-1]
