"""A part of PyTorch's own tests of torch.distributed; `make torch-distributed` runs all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.arena.native import problem

SCRIPT = Path(__file__).parents[1] / "torch_distributed" / "standing_in.py"
PART = ("all_reduce_coalesced", "send_recv_any_source", "all_to_all_single_unequal",
        "gather_object", "scatter_object")  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
def test_a_part_of_torchs_own_tests_passes(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    words = [word for name in PART for word in ("-k", name)]
    done = subprocess.run(
        [sys.executable, SCRIPT, "fivefold", *words],
        capture_output=True, text=True, check=False, timeout=110, cwd=tmp_path,
    )  # fmt: skip
    told = done.stderr.splitlines()
    assert done.returncode == 0, "\n".join(told[-40:])
    found = re.search(r"Ran (\d+) tests.*OK \(skipped=(\d+)\)", done.stderr, re.DOTALL)
    assert found and int(found[1]) - int(found[2]) >= 6, told[-3:]
