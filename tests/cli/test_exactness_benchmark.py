"""The tables of exactness are made as their README says, only smaller."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import python

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "exactness"


@pytest.mark.long
def test_one_model_and_one_step() -> None:
    page = (HERE / "README.md").read_text()
    done = subprocess.run(
        [python(), str(HERE / "run.py"), "--models", "edsr", "--steps", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("height=2, width=2") == 2, "told as it is found, and in the table"
    assert "NOT exact" not in done.stdout
    assert (HERE / "README.md").read_text() == page, "a part of the table replaces nothing"


def test_stages_of_one_model() -> None:
    page = (HERE / "README.md").read_text()
    done = subprocess.run(
        [python(), str(HERE / "stages.py"), "--models=unet", "--steps=1", "--cases=1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pipe=2") == 2, "told as it is found, and in the table"
    assert "NOT exact" not in done.stdout
    assert (HERE / "README.md").read_text() == page, "a part of the table replaces nothing"


@pytest.mark.skipif(find_spec("timm") is None, reason="the libraries are not installed")
def test_a_model_of_a_library(tmp_path: Path) -> None:
    page, kept = (HERE / "README.md").read_text(), tmp_path / "kept.jsonl"
    command = [
        python(),
        str(HERE / "libraries.py"),
        "--libraries",
        "timm",
        "--models",
        "timm/mixer",
    ]
    done = subprocess.run(
        [*command, "--layouts", "data=2", "--kept", str(kept)],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(kept.read_text())["outcome"] == "exact"
    assert (HERE / "README.md").read_text() == page, "a part of the table replaces nothing"
