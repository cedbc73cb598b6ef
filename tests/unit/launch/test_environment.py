"""Environments as real launchers made them (recorded/*.env), and environments that contradict themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch import RankPlace, launched, locate
from fivefold.launch.environment import FAMILIES, without_places

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.env"))


def recorded(name: str) -> dict[str, str]:
    path = Path(__file__).parent / "recorded" / f"{name}.env"
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def expected(path: Path) -> str:
    return path.read_text().splitlines()[1].removeprefix("# expected: ")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_environments(path: Path) -> None:
    environ, want = recorded(path.stem), expected(path)
    if want.startswith("forgot srun"):
        with pytest.raises(
            UsageError, match=rf"allocation has {want.split()[-1]} tasks.*`srun python"
        ):
            locate(environ)
        assert not launched(environ)
    elif want.startswith("unknown"):
        with pytest.raises(UsageError, match=rf"{want.split()[-1]} is set.*does not know"):
            locate(environ)
        assert not launched(environ)
    else:
        rank, size, local_rank, local_size, launcher, job = want.split()
        place = RankPlace(
            int(rank),
            int(size),
            int(local_rank),
            int(local_size),
            launcher,
            None if job == "-" else job,
        )
        assert locate(environ) == place
        assert launched(environ) == (launcher != "alone")


def test_every_launcher_has_a_recording() -> None:
    launchers = {expected(path).split()[-2] for path in RECORDED}
    assert {family.launcher for family in FAMILIES} | {"srun", "alone"} <= launchers


def test_nothing_set_is_one_process_alone() -> None:
    assert locate({}) == RankPlace(0, 1, 0, 1, "alone")


@pytest.mark.parametrize("name", ["salloc_shell", "sbatch_script", "openmpi", "prterun"])
def test_alone_can_be_declared(name: str) -> None:
    environ = recorded(name) | {"FIVEFOLD_ENGINE": "alone"}
    assert locate(environ) == RankPlace(0, 1, 0, 1, "alone")
    assert not launched(environ)


TORCH = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize("name", ["salloc_shell", "sbatch_script", "sbatch_srun", "srun_shell"])
def test_ranks_of_torchrun_win_in_any_slurm_allocation(name: str) -> None:
    place = locate(recorded(name) | TORCH)
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 2, 3)


def test_torchrun_agents_may_be_started_by_mpirun() -> None:
    environ = recorded("openmpi") | TORCH | {"TORCHELASTIC_RUN_ID": "7"}
    assert locate(environ).rank == 2


def test_ranks_written_out_of_what_mpi_says_agree_with_it() -> None:
    environ = recorded("openmpi") | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert locate(environ).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCH, "RANK": "3"}, "rank 3 of 3"),
        ({**TORCH, "LOCAL_RANK": "3"}, "local rank 3 of 3"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "4"}, "local rank 2 of 4.*world of 3"),
        ({**TORCH, "WORLD_SIZE": "three"}, "WORLD_SIZE=three: expected a whole number"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is not set.*LOCAL_RANK=0"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "PMI_RANK is set.*does not know"),
        ({"MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_RANK is set.*does not know"),
    ],
)
def test_contradictions_are_explained(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        locate(environ)


@pytest.mark.parametrize("name", ["openmpi", "mpich", "pals"])
def test_ranks_left_over_in_the_shell_contradict_mpi(name: str) -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(
        UsageError, match=rf"contradict {name}, which started \d processes; unset RANK"
    ):
        locate(recorded(name) | stale)


def test_a_world_size_exported_by_the_batch_script_must_agree() -> None:
    assert locate(recorded("srun") | {"WORLD_SIZE": "3"}).world_size == 3
    with pytest.raises(UsageError, match="WORLD_SIZE=8, but srun started 3"):
        locate(recorded("srun") | {"WORLD_SIZE": "8"})


def test_flux_with_uneven_nodes_asks_for_even_ones() -> None:
    with pytest.raises(UsageError, match=r"3 tasks are spread over 2 nodes.*tasks-per-node"):
        locate(recorded("flux") | {"FLUX_JOB_SIZE": "3"})


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_ranks_started_anew_inherit_no_place(path: Path) -> None:
    environ = recorded(path.stem)
    inner = {f"FIVEFOLD_{name}" for name in ("TRACE_SPOOL", "PLACEMENT", "SUPERVISOR", "LAUNCH")}
    left = without_places(environ | dict.fromkeys(inner, "/tmp"))
    assert not inner & left.keys()
    kept = {k for k in environ if k.startswith(("SLURM_", "PBS_", "PMIX_"))}
    assert kept <= left.keys()
    fresh = left | TORCH
    assert locate(fresh).rank == 2
    assert "TORCHELASTIC_USE_AGENT_STORE" not in left
