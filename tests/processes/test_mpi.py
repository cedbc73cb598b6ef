"""Both MPIs as a user types them, without Fivefold's launcher: every rank knows its place and its job."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mpis
from commands import CLEAN

PLACE = """
import dataclasses, json
from pathlib import Path
from fivefold.launch import locate, meeting
place = locate()
told = json.dumps([dataclasses.asdict(place), str(meeting(place).path)])
Path(f"place-{place.rank}.json").write_text(told)  # mpirun may tear lines of its output
"""

MPI_RANK = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
assert (world.rank, world.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
assert world.allreduce(world.rank + 1) == 3
assert NAME in MPI.Get_library_version(), MPI.Get_library_version()
"""


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, mpis.find(request.param)


def run(command: list[object], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=CLEAN | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def places(mpi: tuple[str, Path], folder: Path, *command: object) -> list[tuple[dict, str]]:
    """What three ranks of `command` say about themselves, by rank."""
    name, mpirun = mpi
    run([mpirun, *mpis.options(name), "-n", 3, *command], folder)
    files = sorted(folder.glob("place-*.json"))
    told = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return told


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "place.py").write_text(PLACE)
    return tmp_path / "place.py"


def test_every_rank_knows_its_place(mpi: tuple[str, Path], script: Path) -> None:
    told = places(mpi, script.parent, sys.executable, script)
    assert len(told) == 3
    for rank, (place, _) in enumerate(told):
        job = place.pop("job")
        assert (job is None) == (mpi[0] == "mpich")
        assert place == {
            "rank": rank,
            "world_size": 3,
            "local_rank": rank,
            "local_size": 3,
            "launcher": mpi[0],
        }


def test_ranks_of_a_job_meet_at_one_file_and_jobs_at_different_ones(
    mpi: tuple[str, Path], script: Path
) -> None:
    first = {path for _, path in places(mpi, script.parent, sys.executable, script)}
    # Ranks behind shells of their own, as in `mpirun bash -c "module load ...; python train.py"`.
    shell = ["sh", "-c", f"true; {shlex.join([sys.executable, str(script)])}; true"]
    second = {path for _, path in places(mpi, script.parent, *shell)}
    assert len(first) == len(second) == 1
    assert first != second
    assert Path(first.pop()).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_ranks_of_the_mpirun_engine_may_use_mpi(mpi: tuple[str, Path], tmp_path: Path) -> None:
    name, mpirun = mpi
    library = {"openmpi": "Open MPI", "mpich": "MPICH"}[name]
    script = tmp_path / "ranks.py"
    script.write_text(MPI_RANK.replace("NAME", repr(library)))
    run(
        [sys.executable, "-m", "fivefold", "run", "-n", 2, "--engine", "mpirun", script],
        tmp_path,
        FIVEFOLD_MPIRUN=str(mpirun),
        MPI4PY_MPIABI=name,
        LD_LIBRARY_PATH=str(mpirun.parent.parent / "lib"),
    )
