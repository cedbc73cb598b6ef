"""Faults in real runs: after ten steps the report names the rank and the cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_cases import CASES, Case
from fivefold.arena.native import problem
from template import Template

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(240)
def test_the_verdict_names_rank_and_cause(case: Case, template: Template, tmp_path: Path) -> None:
    if why := case.needs():
        pytest.skip(why)
    found = case.verdict(template, tmp_path)
    assert case.right(found.text), "\n".join([found.text, *found.findings])
