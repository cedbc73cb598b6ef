"""How scripts come by the backend "fivefold", and by which group: shared memory, or gloo with a reason."""

from __future__ import annotations

import pytest

from comm_script import run
from fivefold.arena.native import problem


@pytest.mark.long
@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
@pytest.mark.parametrize(
    "before",
    [
        "import fivefold.comm",
        # What torch calls by itself where Fivefold is installed; nothing else of ours is imported then.
        "import fivefold; fivefold._known_to_torch(); assert 'fivefold.comm' not in sys.modules",
    ],
)
def test_a_script_only_names_the_backend(before: str) -> None:
    assert run(before).stdout == "SharedGroup fivefold [1.0, 1.0, 1.0]\n"


@pytest.mark.long
def test_without_the_core_a_group_is_gloo_and_says_why() -> None:
    done = run(
        "import fivefold.comm, fivefold.arena.native as native; native.LIBRARY = 'missing.so'"
    )
    assert done.stdout == "ProcessGroup fivefold [1.0, 1.0, 1.0]\n"
    assert "uses gloo: rank 0 cannot share memory: Fivefold was installed without" in done.stderr


@pytest.mark.long
def test_a_hook_that_fails_does_not_break_torch() -> None:
    before = """
import fivefold, fivefold.comm
from unittest import mock
with mock.patch.object(dist.Backend, "register_backend", side_effect=OSError("broken")):
    fivefold._known_to_torch()
"""
    assert "torch does not know the backend fivefold: OSError('broken')" in run(before).stderr
