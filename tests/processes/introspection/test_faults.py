"""Faults in real runs: after ten steps the report names the rank and the cause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fault_cases import CASES, Case
from fivefold.arena.native import problem
from template import Template

RUNS = 3
"""at most: one in which others had the cores, as its report itself says, may have hidden the fault"""

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.mark.long(every=8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(300)
def test_the_verdict_names_rank_and_cause(case: Case, template: Template, tmp_path: Path) -> None:
    if why := case.needs():
        pytest.skip(why)
    for number in range(RUNS):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        found = case.verdict(template, folder)
        told = [found.text]
        crowded = os.getloadavg()[0] > (os.cpu_count() or 1)
        alone = not (crowded and any(finding.startswith("cores: ") for finding in found.findings))
        if not alone:
            # Other tests take the cores: that may well cost more than the fault, which is told after it.
            told += found.findings
        if any(map(case.right, told)):
            return
        assert not alone, "\n".join([found.text, *found.findings])
    pytest.fail(f"not in {RUNS} runs: " + "\n".join([found.text, *found.findings]))
