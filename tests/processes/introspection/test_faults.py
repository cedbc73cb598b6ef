"""Faults in real runs: after ten steps the report names the rank and the cause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fault_cases import CASES, Case
from fivefold.arena.native import problem
from template import Template

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(240)
def test_the_verdict_names_rank_and_cause(case: Case, template: Template, tmp_path: Path) -> None:
    if why := case.needs():
        pytest.skip(why)
    found = case.verdict(template, tmp_path)
    told = [found.text]
    crowded = os.getloadavg()[0] > (os.cpu_count() or 1)
    if crowded and any(finding.startswith("cores: ") for finding in found.findings):
        # Other tests take the cores: that may well cost more than the fault, which is told after it.
        told += found.findings
    assert any(map(case.right, told)), "\n".join([found.text, *found.findings])
