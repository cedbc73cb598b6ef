"""Results kept as JSON, and shown in README.md between markers of their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from figures import environment

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"


def circumstances() -> dict[str, Any]:
    """On what, with what, when."""
    return {**environment(), "torch": torch.__version__}


def keep(name: str, result: dict[str, Any], shown: str) -> None:
    """Write `name`.json, and put `shown` with the circumstances between the markers of that name."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    show(name, shown, result["environment"])


def show(name: str, shown: str, told: dict[str, Any]) -> None:
    """Put `shown` between the markers of that name, and what is told of the circumstances."""
    README.write_text(renewed(README.read_text(), name, f"{shown}\n\n{_told(told)}"))


def renewed(text: str, name: str, shown: str) -> str:
    """The page with another text between the markers of `name`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"README.md lacks the markers of {name}"
    return f"{before}{begin}\n\n{shown}\n\n{end}{after}"


def _told(told: dict[str, Any]) -> str:
    return (
        f"{told['cpu']}; torch {told['torch']}, Python {told['python']}, Linux {told['kernel']}; "
        f"commit {told['commit']}, {told['date']}."
    )


def brief(error: float) -> str:
    """An error with one digit, which is as many as mean something."""
    return f"{error:.0e}" if error else "0"
