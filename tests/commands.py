"""The `fivefold` command as tests type it, in an environment that nobody else has a part in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fivefold.launch.environment import without_places

__all__ = ["CLEAN", "fivefold"]

# The suite may itself run in an allocation, or under a launcher.
CLEAN = {
    name: value
    for name, value in without_places(os.environ).items()
    if not name.startswith(("FIVEFOLD_", "SLURM_", "PBS_"))
}


def fivefold(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`fivefold WORDS` in `cwd`, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "fivefold", *map(str, words)],
        cwd=cwd,
        env=CLEAN | {"COLUMNS": "100"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
