"""The benchmark of collectives runs as its README says, only smaller, and keeps what it measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commands import python
from fivefold.arena.native import problem

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives"


@pytest.mark.slow
@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
@pytest.mark.parametrize("part", ["allreduce", "p2p", "in-c", "steps"])
def test_a_part_is_measured_and_kept(part: str, tmp_path: Path) -> None:
    small = ["--rounds", "7", "--most", "4096", "--models", "resnet18", "--results", str(tmp_path)]
    done = subprocess.run(
        [python(), str(HERE / "run.py"), "--parts", part, *small],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / f"{part}.json").read_text())
    assert kept["rounds"] == 7
    assert f"### {part}" in done.stdout and "too few" not in done.stdout
