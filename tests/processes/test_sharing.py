"""Ranks that share GPUs that are made up: an MPS daemon for each start of ranks, a slice for each rank.

The daemon is a stand-in (mps_stand_in.py): neither NVIDIA's program nor a GPU was there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import mpis
from commands import fivefold
from fivefold.cli.instances import environment_of
from fivefold.cluster.gpus import Gpu
from fivefold.cluster.nvml import Slice
from fivefold.errors import PlanError, UsageError
from fivefold.launch import sharing
from fivefold.launch.job import Job
from fivefold.launch.local import LocalEngine
from fivefold.launch.sharing import own_slices, shared_gpus
from fivefold.plan import Plan, Provenance
from machines import write
from mps_stand_in import install

USER = Provenance("user", "test")
WHOLE = tuple(
    Gpu("NVIDIA", "A100", f"0000:{n}1:00.0", None, 40 << 30, "nvidia", f"GPU-{n}") for n in range(2)
)
PARTS = tuple(Slice(f"MIG-{n}", "A100 MIG 1g.5gb", n, 0, 5 << 30) for n in range(3))
DIVIDED = (replace(WHOLE[0], slices=PARTS[:2]), replace(WHOLE[1], slices=PARTS[2:]))
Gpus = Callable[..., None]
FAKE = """
from fivefold.cluster.gpus import Gpu
from fivefold.cluster.nvml import Slice
import fivefold.launch.sharing as sharing
sharing.gpus = lambda: {found!r}
"""
SCRIPT = """
import os, subprocess, sys
rank, restart = os.environ["RANK"], os.environ.get("FIVEFOLD_RESTART", "0")
names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
asked = subprocess.run(["nvidia-cuda-mps-control"], input=b"get_server_list", stdout=subprocess.PIPE)
told = [os.environ.get(name, "-") for name in names]
print("told", rank, restart, *told, asked.returncode, end="\\n", flush=True)
sys.exit(3 if restart == "0" and "fails" in sys.argv and rank == "0" else 0)
"""


@pytest.fixture
def have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Make up GPUs, and whether MPS is installed."""

    def put(found: tuple[Gpu, ...] = WHOLE, *, mps: bool = True, trouble: str = "") -> None:
        monkeypatch.setattr(sharing, "gpus", lambda: found)
        path = os.environ["PATH"]
        monkeypatch.setenv(
            "PATH", f"{install(tmp_path, trouble)}{os.pathsep}{path}" if mps else str(tmp_path)
        )
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    return put


def test_a_daemon_serves_all_gpus_that_ranks_may_use(have: Gpus) -> None:
    have()
    with shared_gpus({"FIVEFOLD_MPS": "2:auto:50", "CUDA_VISIBLE_DEVICES": "1,0"}, 4) as told:
        assert told["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
        assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert Path(told["CUDA_MPS_PIPE_DIRECTORY"], "control").exists()
    assert not Path(told["CUDA_MPS_PIPE_DIRECTORY"]).exists()


@pytest.mark.parametrize(
    ("environ", "ranks", "found"),
    [
        ({"FIVEFOLD_MPS": "2:off:0"}, 4, WHOLE),
        ({"FIVEFOLD_MPS": "1:on:0"}, 2, WHOLE),
        ({"FIVEFOLD_MPS": "2:on:0"}, 1, WHOLE),
        ({"FIVEFOLD_MPS": "2:auto:0"}, 2, ()),
        ({"FIVEFOLD_MPS": "2:auto:0"}, 2, DIVIDED),
        ({"FIVEFOLD_MPS": "2:auto:0", "CUDA_VISIBLE_DEVICES": ""}, 2, WHOLE),
        ({}, 2, WHOLE),
    ],
    ids=["off", "alone", "one rank here", "no GPU", "slices", "hidden", "not asked"],
)
def test_no_daemon(
    environ: dict[str, str],
    ranks: int,
    found: tuple[Gpu, ...],
    have: Gpus,
    capfd: pytest.CaptureFixture[str],
) -> None:
    have(found)
    with shared_gpus(environ, ranks) as told:
        assert not told
    assert capfd.readouterr().err == ""


def test_mps_that_is_not_there_is_needed_where_it_is_asked_for(have: Gpus) -> None:
    have(mps=False)
    with shared_gpus({"FIVEFOLD_MPS": "2:auto:0"}, 2) as told:
        assert not told
    with (
        pytest.raises(UsageError, match=r"^MPS is not installed: "),
        shared_gpus({"FIVEFOLD_MPS": "2:on:0"}, 2),
    ):
        pass


def test_a_daemon_of_whoever_starts_the_job_is_used(have: Gpus) -> None:
    have()
    environ = {"FIVEFOLD_MPS": "2:on:30", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}
    with shared_gpus(environ, 2) as told:
        assert told == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    with shared_gpus(environ | told | {"FIVEFOLD_MPS": "2:on:40"}, 2) as again:
        assert not again


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_daemon_of_the_site_is_used(
    mode: str, have: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    have()
    monkeypatch.setattr(sharing, "runs_by_default", lambda: True)
    with shared_gpus({"FIVEFOLD_MPS": f"2:{mode}:30"}, 2) as told:
        assert told == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ((), "no GPU of NVIDIA that its ranks may use"),
        (DIVIDED, "GPUs that MIG divides"),
        ((WHOLE[0], replace(WHOLE[1], uuid="")), "GPUs whose UUIDs the driver does not tell"),
    ],
)
def test_mps_that_cannot_be_is_refused(found: tuple[Gpu, ...], why: str, have: Gpus) -> None:
    have(found)
    with (
        pytest.raises(UsageError, match=rf'^instances.mps = "on" cannot be: \S+ has {why}[^\n]*$'),
        shared_gpus({"FIVEFOLD_MPS": "2:on:0"}, 2),
    ):
        pass


def test_mps_that_does_not_start(have: Gpus, capfd: pytest.CaptureFixture[str]) -> None:
    """It was asked for, or ranks do without it and are told."""
    have(trouble="fails")
    with (
        pytest.raises(UsageError, match=r"^MPS does not start: .* already running$"),
        shared_gpus({"FIVEFOLD_MPS": "2:on:0"}, 2),
    ):
        pass
    with shared_gpus({"FIVEFOLD_MPS": "2:auto:0"}, 2) as told:
        assert not told
    said = capfd.readouterr().err
    assert said.startswith("warning: ranks share GPUs in turns, without MPS: MPS does not start: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "ranks", "own"),
    [
        ("1:auto:0", 4, [0, 1, 2, 0]),
        ("2:auto:0", 6, [0, 0, 1, 1, 2, 2]),
        (None, 2, [0, 1]),
    ],
)
def test_each_rank_has_a_slice(asked: str | None, ranks: int, own: list[int], have: Gpus) -> None:
    have(DIVIDED)
    environ = {} if asked is None else {"FIVEFOLD_MPS": asked}
    told = [{"CUDA_VISIBLE_DEVICES": PARTS[n].uuid} for n in own]
    assert own_slices(environ, ranks) == told
    job = Job(["true"], ranks, Path("logs"), environ)
    starts = LocalEngine().starts(job, 1234)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in starts] == [
        PARTS[n].uuid for n in own
    ]


def test_slices_that_were_chosen_and_whole_gpus(have: Gpus) -> None:
    have(DIVIDED)
    chosen = {"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-0"}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in own_slices(chosen, 3)] == [
        "MIG-2", "MIG-0", "MIG-2",
    ]  # fmt: skip
    have((DIVIDED[0], WHOLE[1]))
    assert [one["CUDA_VISIBLE_DEVICES"] for one in own_slices({}, 3)] == ["MIG-0", "MIG-1", "GPU-1"]
    have(WHOLE)
    assert own_slices({}, 2) == [{}, {}]


def test_what_a_plan_asks_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = Plan().replace({"instances.per_device": 2, "instances.percent": 40}, USER)
    assert environment_of(plan, 4) == {"FIVEFOLD_MPS": "2:auto:40", "FIVEFOLD_INSTANCES": "2"}
    free = plan.replace({"instances.bound": False, "instances.percent": 0}, USER)
    free = free.replace({"instances.mps": "off"}, USER)
    assert environment_of(free, 4) == {"FIVEFOLD_MPS": "2:off:0"}
    assert environment_of(Plan(), 4) == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"percent": 101}, "instances.percent = 101: 100 at most"),
        ({"percent": -1}, "at least"),
        ({"percent": 50, "mps": "off"}, "instances.percent = 50 needs MPS"),
        ({"mps": "yes"}, "auto"),
    ],
)
def test_plans_that_cannot_be(values: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan().replace({f"instances.{key}": value for key, value in values.items()}, USER)


# ---- Whole runs


def run(
    folder: Path, found: tuple[Gpu, ...], asked: str, *words: str
) -> dict[tuple[int, int], list[str]]:
    """What ranks were told, by rank and restart."""
    write(folder / "startup", {"sitecustomize.py": FAKE.format(found=found)})
    write(folder, {"script.py": SCRIPT})
    done = fivefold(
        "run", "-n", "2", *words[:-1], "script.py", words[-1], cwd=folder, limit_s=100.0,
        # With a seed to read at its start, Python is started, not forked from what has started already.
        PYTHONPATH=str(folder / "startup"), PYTHONHASHSEED="0", TMPDIR=str(folder),
        PATH=f"{install(folder)}{os.pathsep}{os.environ['PATH']}", FIVEFOLD_MPS=asked,
        **({"FIVEFOLD_MPIRUN": str(mpis.find("openmpi"))} if "mpirun" in words else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*folder.glob("fivefold-mps-*")]
    told = [line.split()[2:] for line in done.stdout.splitlines() if "] told " in line]
    return {(int(rank), int(restart)): rest for rank, restart, *rest in told}


ENGINES = [
    pytest.param((), id="local"),
    pytest.param(("--fork",), id="agent"),
    pytest.param(("--engine", "torchrun"), id="torchrun", marks=pytest.mark.long),
    pytest.param(("--engine", "mpirun"), id="openmpi", marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", ENGINES)
def test_each_start_of_ranks_has_a_fresh_daemon(options: tuple[str, ...], tmp_path: Path) -> None:
    told = run(tmp_path, WHOLE, "2:on:40", *options, "--restarts", "1", "fails")
    assert {(0, 1), (1, 1), (0, 0)} <= told.keys()
    for devices, _, percent, code in told.values():
        assert (devices, percent, code) == ("GPU-0,GPU-1", "40", "0")
    pipes = {key: rest[1] for key, rest in told.items()}
    assert pipes[0, 1] == pipes[1, 1] != pipes[0, 0]


@pytest.mark.parametrize("options", ENGINES)
def test_engines_give_each_rank_its_slice(options: tuple[str, ...], tmp_path: Path) -> None:
    told = run(tmp_path, DIVIDED, "1:auto:0", *options, "ends")
    assert {rank: rest[:2] for (rank, _), rest in told.items()} == {
        0: ["MIG-0", "-"],
        1: ["MIG-1", "-"],
    }


def test_a_job_in_this_process_leaves_nothing(have: Gpus, tmp_path: Path) -> None:
    have()
    script = write(tmp_path, {"script.py": SCRIPT}) / "script.py"
    words = [sys.executable, str(script)]
    LocalEngine().run(Job(words, 2, tmp_path / "logs", {"FIVEFOLD_MPS": "2:auto:0"}))
    said = (tmp_path / "logs" / "rank-1.log").read_text().split()
    assert said[3] == "GPU-0,GPU-1" and not Path(said[4]).exists()
