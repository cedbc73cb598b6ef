"""`fivefold train photos` as it is typed: pictures for targets, at an odd size."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from commands import CLEAN, programs
from fivefold.recipes import models

ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1"}


@pytest.mark.long
def test_an_epoch_on_two_processes_is_told_in_decibels(tmp_path: Path) -> None:
    command = [str(programs() / "fivefold"), "train", "photos", "-n", "2"]
    done = subprocess.run(
        [*command, "--size", "31", "--epochs", "1"],
        cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1  loss" in done.stdout
    told = re.search(r"^test PSNR      ([\d.]+) dB after 1 epoch$", done.stdout, re.MULTILINE)
    assert told and float(told[1]) > 20, "one epoch teaches more than grey"
    assert re.search(r"^bicubic        3\d\.\d\d dB, by interpolation", done.stdout, re.MULTILINE)
    run = tmp_path / "runs" / "photos-001"
    (line,) = (run / "metrics.jsonl").read_text().splitlines()
    assert "accuracy" not in json.loads(line)
    assert f"{json.loads(line)['psnr_db']:.2f}" == told[1]
    weights = torch.load(run / "weights.pt", weights_only=True)
    models.build("edsr_small").load_state_dict(weights)
