"""The cost of recording is measured as its README says, only smaller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "introspection"


def test_both_parts_in_one_round(tmp_path: Path) -> None:
    page = (HERE / "README.md").read_text()
    done = subprocess.run(
        [sys.executable, str(HERE / "overhead.py"), "--rounds", "1", "--steps", "1",
         "--contenders", "fivefold", "fivefold-recorded", "--results", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Goal, at most 0.5 us for an operation" in done.stdout
    assert "Fivefold, recorded" in done.stdout
    assert "not kept" in done.stdout
    assert (HERE / "README.md").read_text() == page
