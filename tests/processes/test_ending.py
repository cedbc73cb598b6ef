"""`fivefold run` ends in time: what ranks are asked, when, and what becomes of those that do not listen."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import mpis
import slurm_cluster
from commands import CLEAN, fivefold, starting
from slurm_cluster import SlurmCluster
from waiting import awaited

TIMEOUT_S = 60.0
SAVES = """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
asked = []

def save(*_):
    asked.append(True)
    if len(asked) > 1:
        sys.exit("asked again")
    time.sleep(0.2 + 0.5 * rank)
    (here / f"{rank}.saved").touch()
    sys.exit(75)

"""
LISTENS = (
    SAVES
    + """
signal.signal(signal.SIGUSR1, save)
(here / f"{rank}.ready").touch()
time.sleep(300)
"""
)
PLAIN = (
    SAVES
    + """
(here / f"{rank}.ready").touch()
time.sleep(300)
"""
)
TRAINS = """
import sys
import torch
import fivefold as ff

with ff.start() as mesh:
    torch.manual_seed(0)
    model = ff.parallelize(torch.nn.Linear(8, 1), mesh, loss=torch.nn.MSELoss())
    samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    data = ff.loader(samples, mesh, batch_size=8, seed=0)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    things = {"model": model, "optim": optim, "data": data}
    where = {"directory": f"{sys.argv[1]}/run", "local": f"{sys.argv[1]}/local"}
    with ff.Checkpointer(mesh=mesh, every=10**6, **where, **things) as ckpt:
        for step, (x, y) in ckpt.resume(data, 10**6):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `fivefold run -n 2` of a script, whose argument is `tmp_path`, with its logs in `logs`."""
    with starting() as begin:

        def launch(body: str, *options: str, **variables: str) -> subprocess.Popen[str]:
            (tmp_path / "script.py").write_text(body)
            words = ["run", "-n", "2", "--log-dir", "logs", *options, "script.py", str(tmp_path)]
            return begin([sys.executable, "-m", "fivefold", *words], CLEAN | variables, tmp_path)

        yield launch


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    _, err = process.communicate(timeout=timeout_s)
    return process.returncode, err


def ready(folder: Path, count: int = 2) -> None:
    awaited(lambda: len([*folder.glob("*.ready")]) == count, "ranks to start", TIMEOUT_S)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.saved"))


def test_ranks_save_before_the_limit_whatever_ctrl_c_would_leave_them(
    start: Start, tmp_path: Path
) -> None:
    process = start(LISTENS, "--time-limit", "4s", FIVEFOLD_END_S="2.5", FIVEFOLD_GRACE_S="0.1")
    code, err = finish(process)
    assert code == 75, err
    assert "s are left; the ranks are asked to save and end" in err
    assert "because its time was up; the same command goes on from there" in err
    assert saved(tmp_path) == ["0.saved", "1.saved"]


@pytest.mark.parametrize(
    ("limit_s", "needs_s", "options"),
    [(9, 2, []), pytest.param(60, 15, ["--fork"], marks=pytest.mark.long)],
)
def test_ranks_are_asked_as_early_as_they_say_that_they_need(
    start: Start, tmp_path: Path, limit_s: int, needs_s: int, options: Sequence[str]
) -> None:
    tells = f"from fivefold.launch.progress import own_progress\nown_progress().saved({needs_s})\n"
    body = LISTENS.replace("0.2 + 0.5 * rank", "1.5 + 0.5 * rank")
    code, err = finish(start(tells + body, "--time-limit", f"{limit_s}s", *options))
    assert code == 75, err
    assert f"note: {2 * needs_s} s are left" in err and saved(tmp_path) == ["0.saved", "1.saved"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_slow_copy_ends_before_the_limit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten MB at a MB/s, and a limit for which ranks would be asked eight seconds before."""
    for folder in ("common", "checkpoint"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / folder))
    (tmp_path / "run").mkdir()
    slow = __import__("throttle").Throttle(tmp_path, 1e6).variables(tmp_path / "run")
    body = TRAINS.replace('{"model"', '{"ballast": torch.rand(2_500_000), "model"')
    body = body.replace("every=10**6", "every=10**6, flush_every=1")
    body = body.replace(
        "ckpt.maybe_save(step)", "ckpt.maybe_save(step)\n            if step == 9: ckpt.save(9)"
    )
    code, err = finish(start(body, "--time-limit", "80s", **slow), 100.0)
    assert code == 75, err
    newest = max((tmp_path / "run").glob("step-*"))
    assert (newest / "manifest.json").exists()
    assert re.search(r"note: (2|3)\d s are left; the ranks are asked", err), err


@pytest.mark.long
@pytest.mark.parametrize("engine", ["torchrun", "openmpi", "mpich", "forked"])
def test_ranks_of_every_engine_save_before_the_limit(
    start: Start, tmp_path: Path, engine: str
) -> None:
    mpi = engine in ("openmpi", "mpich")
    variables = {"FIVEFOLD_MPIRUN": str(mpis.find(engine))} if mpi else {}
    named = ["--engine", "mpirun" if mpi else engine] if engine != "forked" else ["--fork"]
    process = start(LISTENS, "--time-limit", "20s", *named, FIVEFOLD_END_S="10", **variables)
    code, err = finish(process)
    assert code == 75, err
    assert saved(tmp_path) == ["0.saved", "1.saved"]


@pytest.mark.long
def test_training_goes_on_where_its_time_was_up(start: Start, tmp_path: Path) -> None:
    told = ""
    for _ in range(2):
        code, err = finish(start(TRAINS, "--time-limit", "45s", FIVEFOLD_END_S="20"))
        assert code == 75, err
        told += err
        for log in (tmp_path / "logs").iterdir():
            log.unlink()
    assert "goes on after step" in told


def test_ranks_without_a_checkpointer_are_spared_the_signal_and_ended_at_the_limit(
    start: Start, tmp_path: Path
) -> None:
    body = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('cleaned up'))\n"
        + PLAIN
    )
    began = time.monotonic()
    code, err = finish(start(body, "--time-limit", "4s", FIVEFOLD_END_S="2"))
    assert code == 128 + signal.SIGTERM, err
    assert time.monotonic() - began > 2.0
    assert len([*tmp_path.glob("*.ready")]) == 2
    assert "warning: ranks 0, 1 cannot be asked to save: no Checkpointer so far" in err
    assert "error: time is up, and not all ranks had saved; all 2 ranks were stopped" in err


def test_a_rank_that_ignores_the_signal_ends_with_the_time_and_the_others_have_saved(
    start: Start, tmp_path: Path
) -> None:
    body = LISTENS.replace("signal.SIGUSR1, save", "signal.SIGUSR1, (lambda *_: None, save)[rank]")
    body = body.replace(
        "time.sleep(300)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(300)"
    )
    code, err = finish(start(body, "--time-limit", "4s", FIVEFOLD_END_S="2.5"))
    assert code == 75, err
    assert saved(tmp_path) == ["1.saved"]
    assert "; rank 0 took too long and had to be ended; logs" in err


def test_a_limit_shorter_than_the_time_for_saving_is_halved(start: Start, tmp_path: Path) -> None:
    process = start(LISTENS, "--time-limit", "5s", FIVEFOLD_END_S="300")
    code, err = finish(process)
    assert code == 75, err
    assert (
        "warning: FIVEFOLD_END_S=300 is more than half of 5 s; the ranks are asked to save 2 s"
        in err
    )
    assert "note: 2 s are left" in err
    assert len(saved(tmp_path)) == 2


def test_whoever_wants_an_end_makes_a_file(start: Start, tmp_path: Path) -> None:
    process = start(LISTENS)
    ready(tmp_path)
    halt = tmp_path / "logs" / "halt"
    halt.touch()
    awaited(lambda: saved(tmp_path), "the first rank to save")
    halt.touch()  # again
    process.send_signal(signal.SIGUSR1)  # as a scheduler would, near the end
    code, err = finish(process)
    assert code == 75, err
    assert f"because {halt.owner()} asked by logs/halt; the same command goes on" in err
    assert len(saved(tmp_path)) == 2


def test_a_rank_is_asked_as_soon_as_it_listens(start: Start, tmp_path: Path) -> None:
    process = start(PLAIN.replace("time.sleep(300)", """
while not (here / "on").exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, save)
time.sleep(300)
"""))  # fmt: skip
    ready(tmp_path)
    (tmp_path / "logs" / "halt").touch()
    assert process.stderr is not None
    assert "asked by logs/halt" in process.stderr.readline()
    (tmp_path / "on").touch()
    assert finish(process)[0] == 75
    assert len(saved(tmp_path)) == 2


def test_a_run_that_is_to_halt_before_it_starts_does_not(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "halt").touch()
    code, err = finish(start(LISTENS))
    assert code == 75 and "asked by logs/halt" in err and "no rank was started" in err
    assert not [*tmp_path.glob("*.ready")]


def test_a_signal_of_the_scheduler_before_ours_is_the_only_one(
    start: Start, tmp_path: Path
) -> None:
    process = start(
        LISTENS.replace("0.2 + 0.5 * rank", "2.0"), "--time-limit", "6s", FIVEFOLD_END_S="3"
    )
    ready(tmp_path)
    process.send_signal(signal.SIGUSR1)
    time.sleep(2.0)
    assert finish(process)[0] == 75
    assert len(saved(tmp_path)) == 2


FAILS = """
import os, sys, time
from pathlib import Path
with (Path(sys.argv[1]) / "starts").open("a") as file:
    file.write(os.environ["RANK"])
sys.exit(3)
"""


@pytest.mark.parametrize(("options", "code"), [(["--restarts", "1"], 76), ([], 3)])
def test_a_run_whose_restarts_are_used_up_says_so_by_its_code(
    start: Start, options: Sequence[str], code: int
) -> None:
    ended, err = finish(start(FAILS, *options))
    assert ended == code, err
    assert "exited with code 3" in err
    assert ("given up: restart 1 of 1 failed too" in err) == bool(options)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("options", [(), ("--fork",)])
def test_a_signal_in_a_pause_ends_it(start: Start, options: Sequence[str]) -> None:
    process = start("raise SystemExit(3)", "--restarts", "9", *options)
    assert process.stderr is not None
    while "restart 4 of 9 in 4 s" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGUSR1)
    code, err = finish(process)
    assert code == 3, err
    assert "note: a signal asks for an end, and nothing starts again" in err
    assert "restart 5" not in err


def test_the_limit_of_a_run_around_it_counts(start: Start, tmp_path: Path) -> None:
    tells = "from fivefold.launch.progress import own_progress\nown_progress().saved(2.0)\n"
    (tmp_path / "inner.py").write_text(
        tells + LISTENS.replace("0.2 + 0.5 * rank", "1.5 + 0.5 * rank")
    )
    words = [
        "-m",
        "fivefold",
        "run",
        "-n",
        "2",
        "--time-limit",
        "1h",
        "--log-dir",
        "inner",
        "inner.py",
    ]
    outer = f"import os, sys\nos.execv(sys.executable, [sys.executable, *{words}, sys.argv[1]])\n"
    code, err = finish(start(outer, "-n", "1", "--time-limit", "12s"))
    assert code == 75 and re.search(r"note: (3|4) s are left", err), err
    assert saved(tmp_path) == ["0.saved", "1.saved"]


def test_a_limit_that_a_rank_passed_on_to_another_job_does_not_count(start: Start) -> None:
    over = {"FIVEFOLD_ENDS_AT": "999999999:1.000"}
    code, err = finish(start("import os\nassert 'FIVEFOLD_ENDS_AT' not in os.environ", **over))
    assert code == 0, err


def test_nothing_starts_again_that_was_to_end(start: Start, tmp_path: Path) -> None:
    body = LISTENS.replace("sys.exit(75)", "sys.exit(4)")
    process = start(body, "--restarts", "3")
    ready(tmp_path)
    (tmp_path / "logs" / "halt").touch()
    code, err = finish(process)
    assert code == 4 and "restart 1" not in err


@pytest.mark.long
def test_a_recipe_saves_and_ends_in_time(tmp_path: Path) -> None:
    words = ("--epochs", 1000, "--checkpoint", "saved", "--time-limit", "50s")
    done = fivefold("train", "digits", "-n", 2, *words, cwd=tmp_path, FIVEFOLD_END_S="20")
    assert done.returncode == 75, done.stderr
    assert "s are left; the ranks are asked to save and end\n" in done.stderr
    assert "because its time was up; the same command goes on from there" in done.stderr
    done = fivefold("train", "digits", "--requeue", cwd=tmp_path)
    assert done.returncode == 2 and "error: --requeue is for jobs of Slurm" in done.stderr


def test_mistakes_are_told(start: Start) -> None:
    code, err = finish(start(LISTENS, "--time-limit", "90"))
    assert code == 2 and "error: --time-limit '90' is no time; write 30s, 90m, 4h, 2d or" in err
    code, err = finish(start(LISTENS, "--requeue"))
    assert code == 2 and "error: --requeue is for jobs of Slurm, and this is none" in err


# ---- Under Slurm

BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1 --open-mode=append --output=out.txt
logs=logs-${SLURM_RESTART_COUNT:-0}
FIVEFOLD_END_S=25 "$1" -m fivefold run --requeue --log-dir $logs script.py .
code=$?
echo "code $code"
exit $code
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if reason := slurm_cluster.refusal():
        pytest.skip(reason)
    with SlurmCluster(2) as made:
        yield made


def submit(cluster: SlurmCluster, folder: Path, script: str, *options: str) -> str:
    """Submit a job that trains on two nodes; its number."""
    (folder / "script.py").write_text(script)
    (folder / "job.sbatch").write_text(BATCH)
    words = ["sbatch", "--parsable", *options, "job.sbatch", sys.executable]
    environ = CLEAN | cluster.environment | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_of_slurm_saves_in_time_is_queued_again_and_goes_on(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, TRAINS, "--requeue")
    out = tmp_path / "out.txt"
    out.touch()
    awaited(lambda: "Slurm queues the job again" in out.read_text(), "time to be up", 150.0)
    told = out.read_text()
    assert "s are left; the ranks are asked to save and end" in told
    assert "because its time was up" in told
    cluster.call("scontrol", "update", f"jobid={job}", "starttime=now")
    awaited(lambda: "goes on after step" in out.read_text(), "the job to go on", 180.0)
    (tmp_path / "logs-1" / "halt").touch()
    awaited(lambda: out.read_text().endswith("code 75\n"), "the job to end", 90.0)
    assert "asked by logs-1/halt" in out.read_text(), "and it is not queued again"
    show = ("scontrol", "show", "job", job)
    awaited(lambda: "JobState=FAILED" in cluster.call(*show), "Slurm to notice it")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_job_that_may_not_be_queued_again_says_so(cluster: SlurmCluster, tmp_path: Path) -> None:
    submit(cluster, tmp_path, LISTENS, "--no-requeue")
    out = tmp_path / "out.txt"
    out.touch()
    awaited(lambda: out.read_text().endswith("code 75\n"), "the job to end", 150.0)
    assert "warning: Slurm does not queue the job again: " in out.read_text()
    assert len(saved(tmp_path)) == 2
