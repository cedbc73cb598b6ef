"""Runs of tests/gpu/on_gpu.py, whose first rank tells what it found.

With CAMPAIGN_TINY in the environment the tests are tried on a CPU, which tells nothing of GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

__all__ = ["FIVEFOLD", "GPUS", "found_by", "needs_gpu", "run"]

KIND = "cpu" if os.environ.get("CAMPAIGN_TINY") else "cuda"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
FIVEFOLD = (sys.executable, "-m", "fivefold")
SCRIPT = Path(__file__).parent / "gpu" / "on_gpu.py"

needs_gpu = pytest.mark.skipif(
    KIND == "cuda" and GPUS == 0, reason="needs a GPU: torch.cuda.is_available() is False"
)


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`fivefold WORDS`, which has to end well."""
    done = subprocess.run(
        [*FIVEFOLD, *map(str, words)],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def found_by(case: str, folder: Path, *options: str) -> None:
    """Have ranks compute a case of on_gpu.py, which has to pass on all of them."""
    found = folder / "found.json"
    run(folder, "run", *(options or ("-n", "2")), SCRIPT, case, found)
    told = json.loads(found.read_text())
    assert (told["device"], told["passed"]) == (KIND, True), told["said"]
