"""One table of environment variables, and it is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fivefold
from fivefold.errors import UsageError
from fivefold.launch.variables import GIVEN, READ, read_seconds

SOURCES = Path(fivefold.__file__).parent


def test_every_variable_in_the_sources_is_in_the_table() -> None:
    used = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r"""["'](FIVEFOLD_\w+)["']""", path.read_text())
    }
    assert {variable.name for variable in READ} <= used
    assert used <= {variable.name for variable in (*READ, *GIVEN)}


def test_all_variables_are_explained_once() -> None:
    names = [variable.name for variable in (*READ, *GIVEN)]
    assert len(set(names)) == len(names)
    assert all(variable.meaning for variable in (*READ, *GIVEN))


def test_seconds() -> None:
    assert read_seconds("FIVEFOLD_GRACE_S", 5.0, {}) == 5.0
    assert read_seconds("FIVEFOLD_GRACE_S", 5.0, {"FIVEFOLD_GRACE_S": "0.5"}) == 0.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"FIVEFOLD_GRACE_S=.*positive number of seconds"):
        read_seconds("FIVEFOLD_GRACE_S", 5.0, {"FIVEFOLD_GRACE_S": text})
