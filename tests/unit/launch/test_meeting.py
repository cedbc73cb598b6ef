"""Where ranks meet. That real ranks of both MPIs agree on it is shown in tests/processes/test_mpi.py."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch import RankPlace, meeting
from fivefold.launch.meet import Rendezvous

MPI = RankPlace(1, 4, 1, 4, "openmpi", "prterun-node0-4002@1")
TWO_NODES = replace(MPI, local_size=2)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_world_of_one_meets_nobody() -> None:
    assert meeting(RankPlace(0, 1, 0, 1, "openmpi"), {"MASTER_ADDR": "a"}) == Rendezvous("alone")


@pytest.mark.parametrize("place", [MPI, TWO_NODES, replace(MPI, launcher="torchrun")])
def test_an_address_and_a_port_win(place: RankPlace) -> None:
    environ = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    assert meeting(place, environ) == Rendezvous("env", address="node7", port=29500)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MASTER_ADDR": "node7"}, "MASTER_ADDR is set but MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT is set but MASTER_ADDR is not"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "many"}, "MASTER_PORT=many: expected a port"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected a port"),
    ],
)
def test_half_an_address_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        meeting(MPI, environ)


def test_ranks_without_an_address_ask_for_one() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR is not; set MASTER_ADDR"):
        meeting(replace(MPI, launcher="torchrun"), {})


def test_one_node_meets_at_a_file_of_this_user(temporary_folder: Path) -> None:
    found = meeting(MPI, {})
    assert found.kind == "file" and found.path is not None
    assert found.path.parent == temporary_folder / f"fivefold-{os.getuid()}-meet"
    assert found.path.parent.stat().st_mode & 0o777 == 0o700
    assert not found.path.exists()


def test_all_ranks_of_a_job_and_no_other_compute_the_same_file() -> None:
    first = meeting(replace(MPI, rank=0, local_rank=0), {"OMPI_COMM_WORLD_RANK": "0"})
    assert first == meeting(MPI, {"OMPI_COMM_WORLD_RANK": "1"})
    others = [replace(MPI, job="prterun-node0-4003@1"), replace(MPI, launcher="mpich")]
    assert len({first.path, *(meeting(other, {}).path for other in others)}) == 3


def test_a_link_to_elsewhere_is_not_trusted(temporary_folder: Path) -> None:
    (temporary_folder / "elsewhere").mkdir()
    (temporary_folder / f"fivefold-{os.getuid()}-meet").symlink_to("elsewhere")
    with pytest.raises(UsageError, match=r"where ranks meet, is a link.*; or set TMPDIR"):
        meeting(MPI, {})


def test_a_folder_with_checkpoints_is_no_obstacle(temporary_folder: Path) -> None:
    """Saves without `local` used to go where ranks meet, made with the umask's mode."""
    (temporary_folder / f"fivefold-{os.getuid()}" / "checkpoints").mkdir(mode=0o755, parents=True)
    assert meeting(MPI, {}).kind == "file"


def test_srun_over_several_nodes_meets_on_its_first_node() -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[003-005]"}
    found = meeting(replace(TWO_NODES, launcher="srun", job="12.3"), environ)
    assert (found.kind, found.address) == ("env", "gpu003")
    assert 20000 <= found.port < 30000


def test_mpi_over_several_nodes_broadcasts() -> None:
    assert meeting(TWO_NODES, {}) == Rendezvous("mpi")


def test_without_mpi4py_several_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.launch.meet.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="openmpi does not say where to meet; set MASTER_ADDR"):
        meeting(TWO_NODES, {})
    assert "mpi4py" not in sys.modules
