"""What schedulers say of the time that is left, and those that say nothing."""

from __future__ import annotations

import math
import sys
import time

import pytest

from fivefold.errors import UsageError
from fivefold.launch.time_left import (
    Scheduler,
    TimeLeft,
    duration_s,
    flux_left_s,
    pbs_left_s,
    schedulers,
    slurm_left_s,
)
from waiting import awaited

QSTAT = """\
Job Id: 7.server
    Job_Name = waves
    resources_used.cput = 00:00:03
    resources_used.walltime = {used}
    job_state = R
    Variable_List = PBS_O_LANG=C,PBS_O_SHELL=/bin/sh,
\tPBS_O_WORKDIR=/scratch/waves
    Resource_List.ncpus = 8
    Resource_List.walltime = 26:00:00
    stime = {stime}
"""


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7 0:58\n", 58.0),
        ("7 1:00:00\n", 3600.0),
        ("7 2-03:04:05\n", 2 * 86400 + 3 * 3600 + 4 * 60 + 5),
        ("7 UNLIMITED\n", math.inf),
        ("CLUSTER: c\n8 1:00\n7 2:00\n", 120.0),
    ],
)
def test_squeue(said: str, seconds: float) -> None:
    assert slurm_left_s("7", said) == seconds


@pytest.mark.parametrize(
    "said", ["", "7 INVALID\n", "7 NOT_SET\n", "8 1:00\n", "7 -0:10\n", "77 1:00\n"]
)
def test_what_squeue_cannot_mean(said: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        slurm_left_s("7", said)


@pytest.mark.parametrize(
    ("used_s", "since_s", "left_s"),
    [(3600, 3690, 26 * 3600 - 3690), (3600, 3 * 3600, 25 * 3600), (3600, -3600, 25 * 3600)],
    ids=["told late", "clocks differ", "the other way"],
)
def test_qstat(used_s: int, since_s: int, left_s: float) -> None:
    used = f"{used_s // 3600:02}:{used_s // 60 % 60:02}:{used_s % 60:02}"
    stime = time.asctime(time.localtime(time.time() - since_s))
    assert pbs_left_s(QSTAT.format(used=used, stime=stime)) == pytest.approx(left_s, abs=2.0)


def test_qstat_of_a_job_without_limit_and_of_none() -> None:
    assert pbs_left_s("Job Id: 7\n    job_state = R\n") == math.inf
    with pytest.raises(ValueError, match="Unknown Job Id"):
        pbs_left_s("qstat: Unknown Job Id 7.server\n")


def test_flux() -> None:
    assert flux_left_s("3541\n") == 3541.0
    assert flux_left_s("4294967295\n") == math.inf
    with pytest.raises(ValueError, match="not in a job"):
        flux_left_s("flux-job: ERROR: not in a job\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("2d", 172800), ("1-12:00:00", 129600), ("10:00", 600),
     ("1-6", 108000)],
)  # fmt: skip
def test_what_a_user_asks_for(text: str, seconds: float) -> None:
    assert duration_s("--time-limit", text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "90", "-5m", "1e3s", "soon", "1:2:3:4", "nan", "inf"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"--time-limit .* is no time; write 30s"):
        duration_s("--time-limit", text)


def test_who_is_asked() -> None:
    assert not schedulers({})
    both = schedulers({"SLURM_JOB_ID": "7", "FLUX_URI": "local:///x"})
    assert [one.name for one in both] == ["Slurm", "flux"]
    assert [one.name for one in schedulers({"PBS_JOBID": "7.s"})] == ["PBS"]


def test_newer_slurm_tells_the_end_where_there_is_no_squeue() -> None:
    now = int(time.time())
    times = {"SLURM_JOB_START_TIME": str(now - 60), "SLURM_JOB_END_TIME": str(now + 600)}
    (slurm,) = schedulers({"SLURM_JOB_ID": "7"} | times)
    assert slurm.otherwise_s() == pytest.approx(600.0, abs=2.0)
    times["SLURM_JOB_START_TIME"] = str(now + 60)  # by a clock that goes otherwise
    (slurm,) = schedulers({"SLURM_JOB_ID": "7"} | times)
    assert math.isnan(slurm.otherwise_s())


def ask(*commands: tuple[str, ...]) -> tuple[TimeLeft, list[str]]:
    told: list[str] = []
    left = TimeLeft(
        tuple(Scheduler(f"S{n}", words, flux_left_s) for n, words in enumerate(commands))
    )
    with left:
        for _ in range(2):  # nothing is told twice
            left.ask()
            awaited(lambda: left.answered(told.append), "answers")
    return left, told


def test_the_earliest_counts() -> None:
    left, told = ask(("echo", "50"), ("echo", "4294967295"), ("echo", "40"))
    assert left.end - left.asked_at == 40.0 and not told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("no-such-command",), "No such file or directory"),
        (("sh", "-c", "echo is down >&2; exit 1"), "is down"),
        (("echo", "0"), "0"),
        (("true",), "nothing"),
    ],
)
def test_whoever_makes_no_sense_is_told_once_and_sets_no_limit(
    words: tuple[str, ...], why: str
) -> None:
    left, told = ask(words)
    assert left.end == math.inf
    (warning,) = told
    assert warning.startswith("warning: S0 does not tell when this job ends, --time-limit would")
    assert warning.endswith(f"({words[0]}: {why})")


@pytest.mark.long
def test_whoever_does_not_answer_is_not_waited_for() -> None:
    began = time.monotonic()
    left, told = ask((sys.executable, "-c", "import time; time.sleep(60)"))
    assert left.end == math.inf and time.monotonic() - began < 20.0
    assert told[0].endswith("no answer in 5 s)")


def test_what_was_known_before_holds() -> None:
    told: list[str] = []
    answers = iter(["70", "nonsense"])
    left = TimeLeft((Scheduler("S", ("true",), lambda _: flux_left_s(next(answers))),))
    for _ in range(2):
        left.ask()
        awaited(lambda: left.answered(told.append), "answers")
    assert 60.0 < left.end - time.monotonic() <= 70.0
    assert "what it said before holds" in told[0]
