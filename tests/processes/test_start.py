"""`ff.start` under every launcher that runs here, with a real step whose result one process knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpis

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
        # One write per line: torchrun lets the ranks write to one pipe as they please.
        print(f"rank {mesh.rank} of {mesh.size} loss {loss.item():.12f}\\n", end="", flush=True)
"""

ADDRESS = """
from contextlib import ExitStack
from fivefold.mesh.start import _mpi_address
print("rank 0 loss", *_mpi_address(ExitStack()), flush=True)
"""


def launch(name: str) -> list[object]:
    """The words before the number of processes."""
    if name == "fivefold":
        return [Path(sys.executable).parent / "fivefold", "run", "-n"]
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [mpis.find(name), *mpis.options(name), "-n"]


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


@pytest.mark.parametrize("launcher", ["fivefold", "torchrun", "openmpi", "mpich"])
def test_the_loss_is_that_of_one_process(launcher: str, script: Path, alone: str) -> None:
    python = [sys.executable] if "mpi" in launcher else []
    lines = run([*launch(launcher), 2, *python, script], script.parent)
    assert lines == sorted(f"{rank} of 2 loss {alone}" for rank in range(2) for _ in range(2))


def test_over_several_nodes_mpi_tells_the_ranks_where_to_meet(tmp_path: Path) -> None:
    (tmp_path / "address.py").write_text(ADDRESS)
    words = run([*launch("openmpi"), 3, sys.executable, "address.py"], tmp_path)
    assert len(words) == 3
    assert len(set(words)) == 1
    host, port = words[0].split()[2:]
    assert not host.startswith("127.")
    assert 0 < int(port) < 65536


def test_one_process_with_many_asked_for_is_told_what_to_do(script: Path) -> None:
    plan = script.parent / "plan.toml"
    plan.write_text("[layout]\ndata = 2\n")
    done = subprocess.run(
        [sys.executable, "-c", "import fivefold as ff; ff.start(ff.Plan.load('plan.toml'))"],
        check=False, cwd=script.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs 2 processes, but 1 was started" in done.stderr


def test_half_an_address_is_the_users_mistake() -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "import fivefold as ff; ff.start()"],
        check=False,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "UsageError: MASTER_ADDR is set but MASTER_PORT is not" in done.stderr
