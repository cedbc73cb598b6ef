"""The benchmark of the planner: its tables, and a small part of it as it is run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import python
from fivefold.launch.environment import without_places

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "planner"


def reported(expression: str, given: str = "") -> str:
    """What the report makes of something, in a process of its own: reports of benchmarks have one name."""
    code = (
        "import json, sys; sys.path[:0] = sys.argv[1:]; import report; "
        f"sys.stdout.write({expression})"
    )
    folders = [str(BENCHMARK), str(BENCHMARK.parent / "common")]
    done = subprocess.run(
        [python(), "-c", code, *folders],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def row(candidate: str, predicted_s: float, step_s: list[float]) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "predicted": {"step_s": predicted_s, "memory_bytes": 95 << 20},
        "measured": {"step_s": step_s, "memory_bytes": 100 << 20},
    }


def test_tables_have_both_and_judge() -> None:
    told = ("cpu", "cores", "torch", "python", "kernel", "commit", "date")
    rows = [row("data=2", 1.1, [0.9, 1.0, 1.2]), row("pipe=2", 1.2, [0.8, 0.8, 0.8])]
    result = {
        "part": {"model": "resnet20", "image": 96, "ranks": 2, "most": 2, "batch": 4},
        "steps": 3,
        "rows": rows * 4,
        "failed": [],
        "environment": dict.fromkeys(told, "x"),
    }
    text = reported("report.section(json.load(sys.stdin))", json.dumps(result))
    assert "### resnet20, 4 of 96x96, 2 ranks" in text
    first = next(line for line in text.splitlines() if line.startswith("| data=2"))
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == [
        "data=2", "1.000", "0.950 to 1.100", "1.100", "+10%", "100", "95", "-5%"
    ]  # fmt: skip
    assert "error of memory at most 0.1 in the median: 0.050 [0.050, 0.050]: met" in text
    assert "the choice at most 5% slower than the best: 25.0%: missed" in text


def test_the_readme_shows_what_the_results_say() -> None:
    text = (BENCHMARK / "README.md").read_text()
    assert reported("report.renewed(sys.stdin.read(), report.RESULTS)", text) == text


@pytest.mark.slow
def test_a_small_part(tmp_path: Path) -> None:
    words = ["--parts", "resnet20-2", "--image", "32", "--most", "3", "--steps", "2", "--results"]
    done = subprocess.run(
        [python(), str(BENCHMARK / "run.py"), *words, str(tmp_path)],
        env={**without_places(os.environ), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "resnet20-2.json").read_text())
    assert len(kept["rows"]) == 3 and not kept["failed"]
    assert "| candidate, as predicted" in done.stdout
