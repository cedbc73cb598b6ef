"""The documents name every rule of advice and every field of the report, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fivefold.launch.advice import RULES
from fivefold.launch.placement import Placement

DOCS = Path(__file__).resolve().parents[3] / "docs"


def first_cells(page: str, heading: str) -> list[str]:
    """What the first column of the table below a heading names."""
    _, _, after = (DOCS / page).read_text().partition(f"\n{heading}\n")
    section = after.partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]


def test_every_warning_is_in_the_table() -> None:
    assert first_cells("how-to/check-placement.md", "## The warnings") == list(RULES)


def test_every_field_of_the_report_is_described() -> None:
    described = first_cells("reference/run-directory.md", "## `placement.json`")
    assert sorted(described) == sorted(one.name for one in fields(Placement))
