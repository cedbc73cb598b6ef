"""The section of helpers on the page of a report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

import reports
from browser import Open, column, on_screen, written
from fivefold.trace.helping import HelperFigures, SupplyFigures


@pytest.fixture(scope="module")
def helped(folder: Path) -> Path:
    """Four ranks, a helper of this node and one that was lost."""
    story = reports.busy(steps=60)
    helpers = [
        HelperFigures(
            0, "helper 0 (this node)", "ended", "", 10.0, 1.2, 0.5, 400, 12, 1, 0, 0, 1 << 20
        ),
        HelperFigures(
            1, "helper 1 (dpu01:21001)", "lost", "its link broke", 4.0, 0.5, 0.1, 90, 0, 0, 2
        ),
    ]
    story.meta["offload"] = {
        "helpers": [asdict(helper) for helper in helpers],
        "supply": asdict(SupplyFigures(60, 2, 3, 0.12, 2.5, 4.0)),
    }
    return written(folder / "helpers.html", reports.report(folder / "helped", story))


@pytest.mark.long
def test_helpers_and_those_they_serve_are_listed(opened: Open, helped: Path) -> None:
    page = opened(helped)
    assert column(page, "Helpers", 1) == ["helper 0 (this node)", "helper 1 (dpu01:21001)"]
    assert column(page, "Helpers", 2) == ["ended", "lost: its link broke"]
    assert column(page, "Helpers", 3)[0] == "48.0 %"
    assert column(page, "Helpers", 5) == ["1,600", "360"]
    assert column(page, "Trainers with helpers", 0) == ["0", "1", "2", "3"]
    assert column(page, "Trainers with helpers", 3) == ["2.00 ms"] * 4


def test_a_finding_leads_to_the_helper(opened: Open, helped: Path) -> None:
    page = opened(helped)
    page.locator(".finding[data-id=helper-gone] .evidence button").first.click()
    assert on_screen(page.locator("#s-offload h2"))
    assert page.locator("#s-offload tr.lit th").inner_text() == "1"


def test_without_helpers_there_is_no_such_section(opened: Open, report: Path) -> None:
    assert not opened(report).locator("#s-offload").is_visible()
