"""On a GPU with MPS: kernels of two ranks overlap through the daemon of `fivefold run`, and do not without.

    make test PYTEST_FLAGS="tests/gpu/test_mps.py"

Written without a GPU: this has not run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold.cluster.cores import physical
from fivefold.cluster.mps import CONTROL, PIPES, runs_by_default

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="needs a GPU: torch.cuda.is_available() is False"),
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL} on PATH"),
    pytest.mark.skipif(
        PIPES in os.environ or runs_by_default(), reason="an MPS daemon of others runs already"
    ),
    pytest.mark.skipif(
        len(physical(os.sched_getaffinity(0))) < 2, reason="needs a physical core for each rank"
    ),
]

FIVEFOLD = Path(sys.executable).parent / "fivefold"
SCRIPT = Path(__file__).parent / "overlap_on_gpu.py"


@pytest.mark.parametrize("mps", ["on", "off"])
def test_kernels_of_two_ranks_overlap_through_mps(mps: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [
            str(FIVEFOLD), "run", "--instances", "2", "-n", "2", "--set", f"instances.mps={mps}",
            str(SCRIPT), str(found),
        ],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(found.read_text())
    assert told["device"] == "cuda"
    assert bool(told["pipes"]) == (mps == "on")
    assert (told["slowdown"] < 1.5) == (mps == "on"), told
    assert ("do not overlap" in done.stderr) == (mps == "off"), done.stderr
    assert not told["pipes"] or not Path(told["pipes"]).exists()
