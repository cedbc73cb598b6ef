"""`fivefold train --checkpoint`: a recipe that is stopped by a signal and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from fivefold.launch.environment import without_places

CLEAN = {
    name: value
    for name, value in without_places(os.environ).items()
    if not name.startswith("FIVEFOLD_")
} | {"OMP_NUM_THREADS": "1", "FIVEFOLD_LEASE_S": "3"}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        str(Path(sys.executable).parent / "fivefold"), "train", "digits", "-n", "2",
        "--epochs", "2", "--set", f"checkpoint.local={folder / 'local'}", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_recipe_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    through = start(tmp_path, "--out", "through")
    out, err = through.communicate(timeout=100)
    assert through.returncode == 0, err
    first = start(tmp_path, "--checkpoint", "saved")
    end = time.monotonic() + 100
    while not (tmp_path / "runs" / "digits-001" / "metrics.jsonl").exists():  # after an epoch
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=100)
    assert first.returncode == 75, out + err
    second = start(tmp_path, "--checkpoint", "saved")
    out, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    assert "going on after step " in out
    wanted, got = (
        torch.load(tmp_path / where / "weights.pt", weights_only=True)
        for where in ("through/digits-001", "runs/digits-002")
    )
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
