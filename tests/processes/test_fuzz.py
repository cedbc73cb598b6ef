"""Random nets under random layouts: fixed cases of every feature and layout, and all that were ever found.

Outcomes that pass: exact, refused in a line on every rank, or told to be unsure. `make fuzz` runs many more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz.cases import label, tags
from fuzz.grammar import BLOCKS
from fuzz.losses import LOSSES
from fuzz.nets import RETURNS, TAKES
from fuzz.runner import Runner

FUZZ = Path(__file__).parents[1] / "fuzz"
FIXED: list[dict[str, Any]] = json.loads((FUZZ / "fixed.json").read_text())
FOUND = sorted((FUZZ / "found").glob("*.json"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Processes stay from test to test here, and others take their place after a crash."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as made:
        yield made


def check(runner: Runner, case: dict[str, Any]) -> None:
    outcome = runner.run(case)
    if outcome.kind == "hang":  # what hangs does so again; busy cores only take their time
        outcome = runner.run(case)
    told = "\n".join(outcome.details[:20])
    assert not outcome.bad, (
        f"{label(case)}: {outcome.kind}: {outcome.text}\n{told}\n{json.dumps(case)}"
    )


@pytest.mark.long(every=8)
@pytest.mark.parametrize("case", FIXED, ids=lambda case: f"{case['seed']}-{label(case)}")
def test_fixed(runner: Runner, case: dict[str, Any]) -> None:
    check(runner, case)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_found(runner: Runner, file: Path) -> None:
    check(runner, {k: v for k, v in json.loads(file.read_text()).items() if k != "found"})


def test_fixed_cases_have_every_feature() -> None:
    held = {tag for case in FIXED for tag in tags(case)}
    wanted = {*BLOCKS, *(f"loss.{name}" for name in LOSSES)}
    wanted |= {f"takes.{name}" for name in TAKES} | {f"returns.{name}" for name in RETURNS}
    assert not wanted - held
