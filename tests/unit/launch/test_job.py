"""A job as data: its logs, its environment, and what is said when a rank fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fivefold.cluster import granted_cores
from fivefold.errors import UsageError
from fivefold.launch import Job, RankFailure, Stopped
from fivefold.launch.job import log_path, tail


def job(tmp_path: Path, processes: int = 2, **environment: str) -> Job:
    return Job(["true"], processes, tmp_path / "logs", environment)


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_is_a_mistake(tmp_path: Path, processes: int) -> None:
    with pytest.raises(UsageError, match=f"{processes} processes asked for; at least 1"):
        job(tmp_path, processes)


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_does_not_exist(tmp_path: Path, port: int) -> None:
    with pytest.raises(UsageError, match="ports go from 1 to 65535"):
        Job(["true"], 1, tmp_path, port=port)


def test_logs_of_another_run_are_never_overwritten(tmp_path: Path) -> None:
    first = job(tmp_path)
    first.make_log_dir()
    first.make_log_dir()
    log_path(first.log_dir, 0).write_text("precious")
    with pytest.raises(UsageError, match="holds the logs of another run"):
        first.make_log_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write logs to .*logs.*--log-dir"):
        job(tmp_path).make_log_dir()


def test_threads_share_the_granted_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job(tmp_path, 1).rank_environment("local")["OMP_NUM_THREADS"] == str(granted_cores())
    assert job(tmp_path, 999).rank_environment("local")["OMP_NUM_THREADS"] == "1"


def test_threads_that_the_user_set_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert job(tmp_path).rank_environment("local")["OMP_NUM_THREADS"] == "7"
    given = job(tmp_path, OMP_NUM_THREADS="5").rank_environment("local")
    assert given["OMP_NUM_THREADS"] == "5"


def test_ranks_inherit_all_but_an_outer_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    environ = job(tmp_path, EXTRA="1").rank_environment("local")
    assert "RANK" not in environ
    assert environ["SLURM_JOB_ID"] == "12"
    assert environ["EXTRA"] == "1"
    assert environ["FIVEFOLD_ENGINE"] == "local"
    assert environ["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (3, "exited with code 3", 3),
        (-9, "was killed by SIGKILL", 137),
        (-64, "was killed by SIGRTMAX", 192),
    ],
)
def test_a_failure_names_rank_reason_and_last_words(
    tmp_path: Path, code: int, words: str, exit_code: int
) -> None:
    failed = job(tmp_path, 4)
    failed.make_log_dir()
    log_path(failed.log_dir, 2).write_text("".join(f"line {n}\n" for n in range(100)))
    problem = RankFailure(2, code, failed)
    assert f"rank 2 of 4 {words}" in str(problem)
    assert "line 99" in str(problem) and "line 80" in str(problem)
    assert "line 79" not in str(problem)
    assert str(log_path(failed.log_dir, 2)) in str(problem)
    assert problem.exit_code == exit_code


def test_a_rank_that_said_nothing(tmp_path: Path) -> None:
    assert "(it wrote nothing)" in str(RankFailure(0, 1, job(tmp_path, 1)))


def test_stopped_by_a_signal(tmp_path: Path) -> None:
    assert Stopped(signal.SIGINT, job(tmp_path)).exit_code == 130
    assert "interrupted" in str(Stopped(signal.SIGINT, job(tmp_path)))
    assert "stopped by SIGTERM; all 2 ranks" in str(Stopped(signal.SIGTERM, job(tmp_path)))


def test_the_tail_of_a_long_log_with_a_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\n10 %\r20 %\r90 %\nlost \xff byte\r\n\n")
    assert tail(log, 2) == ["90 %", "lost \N{REPLACEMENT CHARACTER} byte"]
    assert tail(tmp_path / "none") == []
