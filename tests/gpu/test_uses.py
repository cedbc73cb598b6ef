"""On a GPU: saves beside steps, and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_runs import found_by, needs_gpu, run

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_what_is_saved_beside_steps_comes_back_to_the_bit(ranks: str, tmp_path: Path) -> None:
    found_by("staged", tmp_path, "-n", ranks)


def test_a_trace_tells_of_steps(tmp_path: Path) -> None:
    found_by("trained", tmp_path, "--trace", "-n", "2", "--log-dir", "logs")
    said = run(tmp_path, "report", "logs").stdout
    assert "2 ranks" in said and "ended after 6 steps" in said
    assert all(f"\n{phase} " in said for phase in ("forward", "backward")), said
