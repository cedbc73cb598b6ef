"""`fivefold run --explain` and `--dry-run` with every engine, and the report by hand, as under srun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpis
from commands import CLEAN, python
from fivefold.cluster.reading import spans
from machines import pretended

ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1"}
CORES = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 90.0

SCRIPT = r"""
import os, sys
words = ["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]]
sys.stdout.write(" ".join(words) + "\n")  # in one piece
if "fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(7)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["local", "torchrun", "openmpi", "mpich"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """`fivefold run -n 2` with one of the engines, of a script that greets."""
    name: str = request.param
    environ = {} if name in ("local", "torchrun") else {"FIVEFOLD_MPIRUN": str(mpis.find(name))}
    engine = "mpirun" if environ else name
    (tmp_path / "greet.py").write_text(SCRIPT)

    def started(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python(), "-m", "fivefold", "run", "-n", "2", "--engine", engine, *words]
        return finished(command, tmp_path, ENVIRON | environ)

    started.engine = engine  # type: ignore[attr-defined]
    return started


def finished(
    command: list[str], cwd: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    return json.loads((path / "placement.json").read_text())


@pytest.mark.long
def test_the_report_comes_first_and_lies_beside_the_logs(run: Run, tmp_path: Path) -> None:
    done = run("--explain", "--log-dir", "logs", "greet.py", "you")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2 you", "[1] rank 1 of 2 you"]
    assert done.stderr.startswith("[0] placement, as the ranks found it:\n")
    assert f"  engine    {run.engine}\n" in done.stderr  # type: ignore[attr-defined]
    report = read(tmp_path / "logs")
    assert (
        report["observed"]
        and report["missing"] == []
        and report["torch"]["version"].startswith("2.")
    )
    assert [(one["rank"], one["mask"], one["threads"]) for one in report["ranks"]] == [
        (0, CORES, 1), (1, CORES, 1),
    ]  # fmt: skip
    assert report["meeting"].startswith("127.0.0.1:")
    logs = {path.name for path in (tmp_path / "logs").iterdir()} - {"engine.log"}
    assert logs == {"placement.json", "rank-0.log", "rank-1.log"}


@pytest.mark.long
def test_the_script_ends_the_run_as_it_does_without_a_report(run: Run, tmp_path: Path) -> None:
    done = run("--explain", "--log-dir", "logs", "greet.py", "fail")
    assert done.returncode == 7
    assert "rank 1 of 2 exited with code 7" in done.stderr


@pytest.mark.long
def test_a_dry_run_prints_what_a_shell_can_run(run: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = run("--dry-run", "--log-dir", "the logs", "-x", "WHO=two words", "greet.py", "a 'b'")
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(tmp_path.rglob("*")) == before, "something was written or run"
    assert done.stdout.startswith(f"# engine {run.engine}, 2 processes, ")  # type: ignore[attr-defined]
    assert "'WHO=two words'" in done.stdout
    again = finished(["sh", "-e", "-c", done.stdout], tmp_path, ENVIRON)
    assert again.returncode == 0, again.stderr
    said = sorted(re.sub(r"^\[\d\] ", "", line) for line in again.stdout.splitlines())
    assert said == ["rank 0 of 2 a 'b'", "rank 1 of 2 a 'b'"]


@pytest.mark.long
def test_a_dry_run_with_a_report_tells_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "--dry-run", "--explain", "--port", "24123", "greet.py"]
    done = finished([python(), "-m", "fivefold", *words], tmp_path, ENVIRON)
    assert done.returncode == 0, done.stderr
    assert "MASTER_PORT=24123" in done.stdout and "fivefold.launch.explain" in done.stdout
    assert done.stderr.startswith("placement, as it would be:")
    assert "  port      127.0.0.1, 24123\n" in done.stderr


@pytest.mark.skipif(len(CORES) < 2, reason="a single core")
def test_a_dry_run_tells_which_cores_ranks_would_have(tmp_path: Path) -> None:
    half = len(CORES) // 2
    near = pretended(tmp_path, [CORES[:half], CORES[half:]])
    words = ["-m", "fivefold", "run", "-n", "2", "--dry-run", "--explain", "--", "true"]
    done = finished([sys.executable, *words], tmp_path, ENVIRON | near)
    assert done.returncode == 0, done.stderr
    for own in (CORES[:half], CORES[half:]):
        assert f"\ntaskset -c {','.join(map(str, own))} env" in done.stdout
        assert f"(mask {spans(own)}" in done.stderr


def by_hand(
    folder: Path, rank: int, ranks: int, *command: str, before: tuple[str, ...] = (), hosts: int = 1
) -> subprocess.Popen[str]:
    """A rank as some launcher starts it; words `before` it bind it or move it to another host."""
    here = ranks // hosts
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
    environ = {name: str(value) for name, value in place.items()}
    words = [*before, sys.executable, "-m", "fivefold.launch.explain", "--log-dir", str(folder)]
    return subprocess.Popen(
        [*words, "--", *command],
        env=ENVIRON | environ | {"MASTER_ADDR": "host0", "MASTER_PORT": "24000"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_every_rank_tells_its_own_mask(tmp_path: Path) -> None:
    ranks = [
        by_hand(tmp_path / "logs", r, 2, "echo", "done", before=("taskset", "-c", str(CORES[r])))
        for r in (1, 0)
    ]
    told = [one.communicate(timeout=TIMEOUT_S) for one in ranks]
    assert [(one.returncode, out) for one, (out, _) in zip(ranks, told, strict=True)] == [
        (0, "done\n")
    ] * 2
    assert told[0][1] == ""
    assert f"rank 0: 1 of {os.cpu_count()} (mask {CORES[0]}); rank 1: 1 of " in told[1][1]
    assert [one["mask"] for one in read(tmp_path / "logs")["ranks"]] == [[CORES[0]], [CORES[1]]]


def host(name: str, folder: Path) -> tuple[str, ...]:
    """What to put before a command so that it runs on a host of this name, which resolves to 127.0.1.1."""
    (folder / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    enter = f"hostname {name}; mount --bind '{folder / name}' /etc/hosts; exec \"$@\""
    return ("unshare", "--uts", "--mount", "sh", "-ec", enter, "sh")


@pytest.mark.long
def test_ranks_of_several_hosts_meet_in_a_folder_that_they_share(tmp_path: Path) -> None:
    if finished([*host("host0", tmp_path), "true"], tmp_path, ENVIRON).returncode:
        pytest.skip("no hosts of other names: unshare is not allowed here")
    ranks = [
        by_hand(tmp_path / "logs", r, 2, "echo", "done", before=host(f"host{r}", tmp_path), hosts=2)
        for r in (0, 1)
    ]
    told = [one.communicate(timeout=TIMEOUT_S) for one in ranks]
    assert [out for out, _ in told] == ["done\n"] * 2
    assert "  ranks     2 on 2 hosts (host0, host1)\n" in told[0][1]
    report = read(tmp_path / "logs")
    assert [one["address"] for one in report["ranks"]] == ["127.0.1.1"] * 2
    assert "loopback-address" in [one["id"] for one in report["findings"]]


def test_a_report_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, no folder")
    out, err = (one := by_hand(tmp_path / "logs", 0, 1, "echo", "done")).communicate(
        timeout=TIMEOUT_S
    )
    assert (one.returncode, out) == (0, "done\n")
    assert err.startswith("warning: rank 0 cannot tell where it runs: ")


def test_a_folder_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text("{}")
    out, err = (one := by_hand(tmp_path, 0, 1, "echo", "done")).communicate(timeout=TIMEOUT_S)
    assert (one.returncode, out) == (2, "")
    assert (
        err
        == f"error: {tmp_path} holds the placement.json of another run; choose another --log-dir\n"
    )


@pytest.mark.long
def test_a_command_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    out, err = (one := by_hand(tmp_path, 0, 1, "no-such-program")).communicate(timeout=TIMEOUT_S)
    assert (one.returncode, out) == (2, "")
    assert err.endswith("error: cannot start no-such-program: No such file or directory\n")
