"""`ff.start` under every launcher that runs here, with a real step whose result one process knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpis
from fivefold.launch.port import reserved_port
from fivefold.mesh.start import _own_address
from nodes import Nodes, refusal

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
from datetime import timedelta
from fivefold.launch import Rendezvous, locate
from fivefold.mesh.start import open_store
import psutil
place = locate()
store = open_store(Rendezvous("mpi"), place, timedelta(seconds=30))
store.set(f"was {place.rank}", "here")
store.wait([f"was {rank}" for rank in range(3)])
if place.rank == 0:
    for one in psutil.Process().net_connections(kind="tcp"):
        if one.status == "LISTEN" and one.laddr.port == store.port:
            print("rank 0 loss", one.laddr.ip, flush=True)
    store.set("looked", "")
store.wait(["looked"])
"""

LISTENS = """
import os
import psutil
import torch.distributed as dist
import fivefold as ff
with ff.start() as mesh:
    if mesh.rank == 0:
        for one in psutil.Process().net_connections(kind="tcp"):
            if one.status == "LISTEN" and one.laddr.port == int(os.environ["MASTER_PORT"]):
                print("rank 0 loss", one.laddr.ip, flush=True)
    dist.barrier()
"""

STANDS_ELSEWHERE = """
import time
import fivefold as ff
from fivefold.errors import FivefoldError
with ff.start() as mesh:
    if mesh.rank == 0:
        try:
            mesh.own_group("data")
        except FivefoldError as problem:
            print("rank 0 loss", problem, flush=True)
    else:
        time.sleep(25)
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


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["fivefold", "torchrun", "openmpi", "mpich"])
def test_the_loss_is_that_of_one_process(launcher: str, script: Path, alone: str) -> None:
    python = [sys.executable] if "mpi" in launcher else []
    lines = run([*launch(launcher), 2, *python, script], script.parent)
    assert lines == sorted(f"{rank} of 2 loss {alone}" for rank in range(2) for _ in range(2))


@pytest.mark.long
def test_over_several_nodes_mpi_tells_the_ranks_where_to_meet(tmp_path: Path) -> None:
    (tmp_path / "address.py").write_text(ADDRESS)
    [words] = run([*launch("openmpi"), 3, sys.executable, "address.py"], tmp_path)
    address = words.split()[-1]
    assert not address.startswith("127.") and address not in ("::", "0.0.0.0")


def test_on_one_node_nobody_else_reaches_the_store(tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS)
    assert run([*launch("fivefold"), 2, "listens.py"], tmp_path) == ["0 loss 127.0.0.1"]


@pytest.mark.parametrize("named", ["address", "localhost"])
def test_over_several_nodes_the_store_listens_at_the_address_that_was_told(
    named: str, tmp_path: Path
) -> None:
    """Two ranks of one host that take themselves for the only ones of theirs."""
    (tmp_path / "listens.py").write_text(LISTENS)
    address = _own_address() if named == "address" else named
    with reserved_port(None) as port:
        shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "listens.py"],
                cwd=tmp_path,
                env={**os.environ, **shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    alike = "MASTER_ADDR=localhost is no address of this host" in told[0][1]
    if named == "address":
        assert told[0][0].split() == ["rank", "0", "loss", address] and not alike
    else:
        assert told[0][0].split()[-1] in ("::", "0.0.0.0") and alike


@pytest.mark.long
def test_a_rank_that_does_not_come_to_make_a_group_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere.py").write_text(STANDS_ELSEWHERE)
    monkeypatch.setenv("FIVEFOLD_TIMEOUT_S", "20")
    [told] = run([*launch("fivefold"), 2, "elsewhere.py"], tmp_path)
    assert "rank 0 of 2: making group " in told
    assert "rank 1 did not come within 20 s (comm.timeout_s of the plan, or" in told


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


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_addresses_without_names_are_no_matter_for_warnings() -> None:
    with Nodes(2) as nodes:
        hosts = nodes.shared.parent / "hosts"
        named = hosts.read_text().splitlines(keepends=True)
        hosts.write_text("".join(line for line in named if not line.startswith("::")))
        (nodes.shared / "starts.py").write_text("import fivefold as ff\nwith ff.start(): pass\n")
        command = [sys.executable, "starts.py"]
        told = nodes.job(command).succeed(60)
        assert not any("[c10d]" in text for text in told), told
        told = nodes.job(command, env=lambda _: {"TORCH_CPP_LOG_LEVEL": "WARNING"}).succeed(60)
        assert all("hostname of the client socket cannot be" in text for text in told), told
