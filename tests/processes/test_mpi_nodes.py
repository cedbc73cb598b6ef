"""Both MPIs over nodes: hosts of other names on this machine, entered as by a remote shell."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mpis
from commands import CLEAN

REMOTE_SHELL = """\
#!/bin/sh
# HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --user --map-root-user --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""
MEETS = """
import fivefold as ff
import os, socket, torch
import torch.distributed as dist
with ff.start() as mesh:
    total = torch.ones(1)
    dist.all_reduce(total)
    from pathlib import Path
    Path(f"rank-{mesh.rank}").write_text(f"{total.item():g} {socket.gethostname() == 'other'}")
"""

SUMS = """
import fivefold as ff
import torch, torch.distributed as dist
from fivefold.comm import streams
from pathlib import Path
with ff.start() as mesh:
    total = torch.full((100_000,), mesh.rank + 1.0)
    dist.all_reduce(total)
    assert total.eq(3).all()
    Path(f"rank-{mesh.rank}").write_text(streams.door().world and "by MPI")
"""

_ENTERED = subprocess.run(
    ["unshare", "--user", "--map-root-user", "--uts", "hostname", "other"],
    capture_output=True,
    text=True,
    check=False,
)
pytestmark = [
    pytest.mark.skipif(bool(_ENTERED.returncode), reason=_ENTERED.stderr.strip() or "no unshare"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py"),
]


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    return request.param


def environment(name: str, folder: Path, slots: int = 1) -> dict[str, str]:
    """What a site sets: two hosts, and how to reach the other one."""
    remote, hosts = folder / "remote.sh", folder / "hosts"
    remote.write_text(REMOTE_SHELL)
    remote.chmod(0o755)
    (folder / "meets.py").write_text(MEETS)
    if name == "mpich":
        hosts.write_text(f"localhost:{slots}\nother:{slots}\n")
        own = {"HYDRA_HOST_FILE": str(hosts), "HYDRA_LAUNCHER_EXEC": str(remote)}
    else:
        hosts.write_text(f"localhost slots={slots}\nother slots={slots}\n")
        own = {"PRTE_MCA_prte_default_hostfile": str(hosts), "PRTE_MCA_plm_ssh_agent": str(remote)}
    return CLEAN | own | {"FIVEFOLD_MPIRUN": str(mpis.find(name)), "FIVEFOLD_TIMEOUT_S": "40"}


def run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip


def by_engine(script: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    fivefold = [sys.executable, "-m", "fivefold", "run", "-n", "2", "--engine", "mpirun"]
    return run([*fivefold, "-x", "GIVEN=two words", script], folder, env)


@pytest.mark.long
def test_an_engine_of_one_node_refuses_several_with_the_line_that_works(
    mpi: str, tmp_path: Path
) -> None:
    env = environment(mpi, tmp_path)
    done = by_engine("meets.py", tmp_path, env)
    assert done.returncode == 2, done.stderr
    assert re.match("error: mpirun would start ranks on other too, and fivefold run", done.stderr)
    assert not list(tmp_path.glob("rank-*")) and not (tmp_path / "fivefold-logs").exists()
    (line,) = re.findall("`(.*?)`", done.stderr)
    done = run(shlex.split(line), tmp_path, env)
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == ["2 False", "2 True"]


@pytest.mark.long
def test_ranks_that_fit_on_this_node_start(mpi: str, tmp_path: Path) -> None:
    env = environment(mpi, tmp_path, slots=2)
    done = by_engine("meets.py", tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank-1").read_text() == "2 False"


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("/nowhere/libmpi.so", "did not load MPI: cannot load MPI library; /nowhere/libmpi.so: "),
        ("", "loaded another MPI than that of the mpirun that started them: "),
    ],
)
def test_the_library_of_mpi_that_does_not_fit_is_named(
    library: str, told: str, tmp_path: Path
) -> None:
    env = environment("mpich", tmp_path)
    if library:
        env["MPI4PY_LIBMPI"] = library
    else:
        mpis.find("openmpi")  # beside this Python, where mpi4py looks
    done = run([env["FIVEFOLD_MPIRUN"], "-n", "2", sys.executable, "meets.py"], tmp_path, env)
    assert done.returncode != 0
    assert told in done.stderr, done.stderr
    assert "set MPI4PY_LIBMPI to the library of that mpirun" in done.stderr


@pytest.mark.long
def test_mpi_carries_what_goes_between_nodes(mpi: str, tmp_path: Path) -> None:
    env = environment(mpi, tmp_path)
    mpirun = Path(env["FIVEFOLD_MPIRUN"])
    (tmp_path / "plan.toml").write_text('[comm]\ntransport = "mpi"\n')
    library = mpis.library(mpi)
    told = env | library | {"FIVEFOLD_PLAN": str(tmp_path / "plan.toml")}
    told["UCX_TLS"] = (
        "tcp,self"  # MPICH's: it takes both for one host, whose memory one must not open
    )
    passed = [word for variable in ("FIVEFOLD_PLAN", *library) for word in ("-x", variable)]
    (tmp_path / "sums.py").write_text(SUMS)
    done = run(
        [
            str(mpirun),
            *mpis.options(mpi),
            *(passed if mpi == "openmpi" else []),
            "-n",
            "2",
            sys.executable,
            "sums.py",
        ],
        tmp_path,
        told,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["by MPI"] * 2
