"""The cost of recording and of reports is measured as the README says, only smaller."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import python

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "introspection"
PAGE = HERE / "README.md"
CHROMIUM = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


def measured(script: str, *words: str) -> str:
    done = subprocess.run(
        [python(), str(HERE / script), *words],
        check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_recording_in_one_round(tmp_path: Path) -> None:
    page = PAGE.read_text()
    said = measured(
        "overhead.py", "--rounds=1", "--steps=1", "--contenders=fivefold", f"--results={tmp_path}"
    )
    assert "Goal, adding up at most 0.5 us for an operation" in said
    assert "Fivefold, recorded" in said
    assert "not kept" in said and not list(tmp_path.iterdir())
    assert PAGE.read_text() == page


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
def test_reports_of_many_ranks(tmp_path: Path) -> None:
    page = PAGE.read_text()
    said = measured("scale.py", "--ranks=70", "--steps=10", "--rounds=7", f"--results={tmp_path}")
    assert "### Reports of 70 ranks" in said and "10 steps each" in said
    assert "rank 69 arrives 12 ms late" in said
    assert "a page of less than 10 MB: met" in said
    kept = json.loads((tmp_path / "scale.json").read_text())
    assert kept["ranks"] == 70 and kept["page_bytes"] > 1e5
    assert {name: len(seconds) for name, seconds in kept["seconds"].items()} == {
        "read": 7, "judge": 7, "page": 7, "open": 7,
    }  # fmt: skip
    assert PAGE.read_text() == page


def test_the_readme_shows_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (HERE.parent / "common", HERE):
        monkeypatch.syspath_prepend(str(folder))
    text = PAGE.read_text()
    try:
        assert __import__("report").PAGE.renewed(text, HERE / "results") == text
    finally:
        for name in ("contender", "figures", "publishing", "report"):
            sys.modules.pop(name, None)
