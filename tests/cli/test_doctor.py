"""`fivefold doctor` as it is typed, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import CLEAN

ENVIRON = {name: value for name, value in CLEAN.items() if not name.startswith("OMP_")}
CORES = sorted(os.sched_getaffinity(0))
TORCH = """
from types import SimpleNamespace
__version__, version = "9.9", SimpleNamespace(cuda=None, hip=None)
cuda = SimpleNamespace(device_count=lambda: 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory; a torch that is imported at once lies in its folder `fast`."""
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "torch.py").write_text(TORCH)
    return tmp_path


def doctor(
    folder: Path, *words: object, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "fivefold", "doctor", *map(str, words)],
        cwd=folder,
        env=ENVIRON | {"PYTHONPATH": str(folder / "fast")} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Warnings by id, of a report in JSON."""
    assert done.returncode == 0, done.stderr
    return {one["id"]: one["what"] for one in json.loads(done.stdout)["findings"]}


def test_with_the_torch_that_is_installed(folder: Path) -> None:
    done = doctor(folder, "-n", 1, PYTHONPATH="")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("node ")
    assert "placement, as it would be:" in done.stdout
    assert "torch 2." in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].endswith(("no warnings", "1 warning", "warnings"))
    assert list(folder.iterdir()) == [folder / "fast"]  # nothing was written


def test_warnings_have_remedies_and_leave_the_exit_code_alone(folder: Path) -> None:
    done = doctor(folder, "-n", 2, OMP_NUM_THREADS="999")
    assert done.returncode == 0
    assert "warning more-threads-than-cores: 2 ranks on " in done.stdout
    assert "\n  why:    " in done.stdout and "\n  remedy: set OMP_NUM_THREADS=" in done.stdout
    assert doctor(folder, "-n", 2, "--strict", OMP_NUM_THREADS="999").returncode == 1


def test_json_holds_all_of_it(folder: Path) -> None:
    report = json.loads(doctor(folder, "--json", "-n", 2).stdout)
    assert report["observed"] is False and report["engine"] == "local"
    assert [one["rank"] for one in report["ranks"]] == [0, 1]
    assert report["ranks"][1]["mask"] == CORES == report["node"]["mask"]
    assert report["torch"]["version"] == "9.9"
    assert report["node"]["memory"]["total_bytes"] > 0


def test_a_mask_is_seen(folder: Path) -> None:
    before = ("taskset", "-c", str(CORES[-1]))
    done = doctor(folder, "--json", "-n", 3, before=before, OMP_NUM_THREADS="1")
    assert json.loads(done.stdout)["node"]["mask"] == [CORES[-1]]
    if (os.cpu_count() or 1) > 1:
        assert found(done)["all-on-one-core"].startswith("all 3 ranks on ")


def test_the_plan_tells_ranks_and_workers(folder: Path) -> None:
    (folder / "plan.toml").write_text("[layout]\ndata = 3\n[loader]\nworkers = 500\n")
    done = doctor(folder, "--json", "--plan", "plan.toml")
    assert json.loads(done.stdout)["world_size"] == 3
    assert "are 1503 processes on " in found(done)["workers-on-trainers-cores"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('no such symbol')", "ImportError: no such symbol"),
        ("import time; time.sleep(300)", "it was not imported within 0.5 s"),
        ("import os; os.abort()", "importing it ended with SIGABRT"),
    ],
)
def test_a_torch_that_is_broken_or_slow_is_a_warning(
    folder: Path, source: str, problem: str
) -> None:
    (folder / "fast" / "torch.py").write_text(source)
    limit = ("--torch-limit", 0.5) if "sleep" in source else ()
    told = found(doctor(folder, "--json", *limit))
    assert told["torch-unusable"] == f"PyTorch cannot be used: {problem}"


def test_under_a_launcher_rank_0_reports_on_itself(folder: Path) -> None:
    place = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "24000", "OMP_NUM_THREADS": "2"}
    before = ("taskset", "-c", str(CORES[0]))
    done = doctor(folder, "--json", before=before, **place, RANK="0")
    report = json.loads(done.stdout)
    assert (report["engine"], report["world_size"], report["missing"]) == ("torchrun", 4, [1, 2, 3])
    assert report["observed"] is True
    told = found(done)
    assert told["loopback-address"] == "MASTER_ADDR is 127.0.0.1, for ranks on 2 nodes"
    if (os.cpu_count() or 1) > 1:
        assert told["one-core-mask"] == f"rank 0 may use core {CORES[0]} alone"
    place |= {"LOCAL_RANK": "1", "RANK": "1"}
    others = doctor(folder, before=(), **place)
    assert (others.returncode, others.stdout, others.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", 0), "error: -n 0: at least 1 rank is needed"),
        (("--plan", "none.toml"), "error: cannot read the plan none.toml"),
        (("--torch-limit", 0), "error: --torch-limit 0: expected seconds above 0"),
        (("--jsn",), "error: unknown option --jsn; did you mean --json?"),
    ],
)
def test_mistakes_are_told_in_a_line(folder: Path, words: tuple[object, ...], message: str) -> None:
    done = doctor(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
