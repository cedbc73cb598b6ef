"""One table of environment variables, and it is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fivefold
from fivefold.errors import UsageError
from fivefold.launch.variables import GIVEN, READ, check_variables, read_seconds

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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FIVEFOLD_TIMEOUT", "60", "variable FIVEFOLD_TIMEOUT; did you mean 'FIVEFOLD_TIMEOUT_S'"),
        ("FIVEFOLD_TIMEOUT_S", "soon", "FIVEFOLD_TIMEOUT_S=soon: expected a positive number of seconds"),
        ("FIVEFOLD_LEASE_S", "-1", "FIVEFOLD_LEASE_S=-1: expected a positive number of seconds"),
        ("FIVEFOLD_ENGINE", "alon", "FIVEFOLD_ENGINE=alon is not a choice; did you mean 'alone'"),
        ("FIVEFOLD_ROLE", "spare", "FIVEFOLD_ROLE=spare is not a choice; valid: trainer, helper"),
        ("FIVEFOLD_HELPERS", "dpu01", "FIVEFOLD_HELPERS cannot be that: it is addresses of the helpers"),
        ("FIVEFOLD_HELPER_KEY", "zz", "FIVEFOLD_HELPER_KEY cannot be that: it is 64 hexadecimal digits"),
        ("FIVEFOLD_DEBUG", "yes", "FIVEFOLD_DEBUG=yes is not a choice; valid: 0, 1"),
    ],
)  # fmt: skip
def test_a_launcher_refuses_what_cannot_be(name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        check_variables({"PATH": "/bin", name: value})


def test_what_fivefold_sets_itself_is_taken() -> None:
    check_variables(
        {"FIVEFOLD_HELPERS": "[::1]:21001,unix:/tmp/a.sock", "FIVEFOLD_HELPER_KEY": "0f" * 32}
    )
    check_variables({"FIVEFOLD_LOG_DIR": "logs", "FIVEFOLD_ENGINE": "mpirun", "FIVEFOLD_DEBUG": ""})
