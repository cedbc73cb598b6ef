"""When ranks are started again, and when not: by how far they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import fivefold

STEPS = """
import os, signal, sys, time
import torch
import fivefold as ff
restart = int(os.environ.get("FIVEFOLD_RESTART", 0))
with ff.start() as mesh:
    model = ff.parallelize(torch.nn.Linear(3, 2), mesh, loss=torch.nn.MSELoss())
    for step in range(1, 6):
        if step == 4 and mesh.rank == 1 and not restart:
            {trouble}
        model.step(*model.shard(torch.ones(4, 3), torch.ones(4, 2)))
    print("ended")
"""
LIGHT = """
import os, time
from fivefold.launch.progress import own_progress
told = own_progress()
for step in range(1, 5):
    if (step, os.environ["RANK"], os.environ.get("FIVEFOLD_RESTART")) == (4, "1", None):
        time.sleep(60)
    told.stepped()
if os.environ.get("FIVEFOLD_RESTART"):
    told.leave()  # as the end of a mesh does: on busy cores the end of a process may take seconds
else:
    time.sleep(60)
print("ended")
"""
"""without torch, whose first step takes seconds on a busy machine"""
SAVES = """
import os, sys
import torch
import fivefold as ff
restart = int(os.environ.get("FIVEFOLD_RESTART", 0))
with ff.start() as mesh:
    samples = torch.utils.data.TensorDataset(torch.ones(32, 3), torch.ones(32, 2))
    data = ff.loader(samples, mesh, batch_size=4, seed=0)
    model = ff.parallelize(torch.nn.Linear(3, 2), mesh, loss=torch.nn.MSELoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim, "data": data}
    with ff.Checkpointer("far", mesh, local="near", every=2, **state) as ckpt:
        for step, (x, y) in ckpt.resume(data, 1):
            if step == 5 and restart < int(sys.argv[1]):
                raise RuntimeError("lost in step 5")
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
            ckpt.wait()
    print("ended")
"""


def went_on(told: str) -> list[str]:
    """After which steps runs went on."""
    return re.findall(r"^\[0\] fivefold: .* goes on after step (\d+)", told, re.MULTILINE)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("options", [(), ("--fork",)])
def test_ranks_that_stand_still_are_started_again(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(LIGHT)
    words = ("run", "-n", "2", "--stall", "4s", "--restarts", "1", *options, "light.py")
    done = fivefold(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 2
    assert (
        "warning: no sign of life for 4 s, and the ranks were stopped: rank 1 is behind, in step 3, others "
        "are in step 4 of this start\n" in done.stderr
    )


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--fork",), ("--engine", "torchrun")])
def test_a_stall_ends_a_job_without_restarts(options: tuple[str, ...], tmp_path: Path) -> None:
    trouble = "os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "steps.py").write_text(STEPS.format(trouble=trouble))
    done = fivefold("run", "-n", "2", "--stall", "30s", *options, "steps.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: no sign of life for 30 s, and the ranks were stopped: rank 1" in done.stderr


@pytest.mark.long
def test_a_stall_of_a_traced_run_names_whom_the_hang_watch_found(tmp_path: Path) -> None:
    """All have begun as many steps: these name nobody."""
    trouble = "model.module.register_forward_pre_hook(lambda *_: time.sleep(60))"
    (tmp_path / "steps.py").write_text(STEPS.format(trouble=trouble))
    words = ("run", "-n", "2", "--trace", "--stall", "8s", "steps.py")
    done = fivefold(*words, cwd=tmp_path, FIVEFOLD_HANG_S="2")
    assert done.returncode == 1
    assert re.search(
        r"error: no sign of life for 8 s, and the ranks were stopped: all are in step 4 of this start\n"
        r"  fivefold: hang: rank 0 has waited .* for rank 1\n",
        done.stderr,
    ), done.stderr


def test_a_script_that_tells_nothing_is_let_alone(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1.5)\nprint('ended')\n")
    done = fivefold("run", "-n", "2", "--stall", "0.3s", "sleeps.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("ended")) == (0, 2), done.stderr


def test_what_is_lost_twice_at_a_step_goes_on_from_an_older_save(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    done = fivefold("run", "--restarts", "3", "saves.py", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "restart 2 of 3 in 1 s, from a save before step 4\n" in done.stderr
    assert done.stderr.count("the run was lost twice after it went on from there") == 1
    assert went_on(done.stderr) == ["4", "2"]


@pytest.mark.long
def test_what_is_lost_three_times_at_a_step_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    done = fivefold("run", "-n", "2", "--restarts", "9", "saves.py", "9", cwd=tmp_path)
    assert done.returncode == 76
    assert done.stderr.count("\nrestart ") == 2
    assert "\n  given up: the run was lost 3 times after step 4\n" in done.stderr


@pytest.mark.long
def test_a_run_without_an_older_save_goes_on_from_the_one_there_is(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES.replace("every=2", "every=4"))
    done = fivefold("run", "--restarts", "2", "saves.py", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert went_on(done.stderr) == ["4", "4"]


LOST_ONCE = """
import os, sys
from fivefold.launch.progress import own_progress
told = own_progress()
told.went_on_from(4, sys.argv[1])
told.given(6)
sys.exit(75 if "FIVEFOLD_RESTART" in os.environ else 3)
"""
"""after step 5, by each job; its time is up then"""


@pytest.mark.long(every=3)
@pytest.mark.timeout(300)  # forked ranks: torch is imported ten times
@pytest.mark.parametrize("options", [(), ("--log-dir", "logs"), ("--fork",)])
def test_losses_of_jobs_before_count(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST_ONCE)
    words = ["run", "-n", "2", "--restarts", "3", *options, "lost.py", "0a0b"]

    def job() -> tuple[int, str]:
        done = fivefold(*words, cwd=tmp_path)
        for log in tmp_path.glob("logs/r*"):
            log.rename(tmp_path / f"{len([*tmp_path.iterdir()])}")  # as if it had another folder
        return done.returncode, done.stderr

    code, told = job()
    assert code == 75 and "from a save before" not in told
    words[-1] = "0c0d"
    assert "from a save before" not in job()[1], "which is another run"
    words[-1] = "0a0b"
    code, told = job()
    assert code == 75 and "restart 1 of 3 now, from a save before step 4\n" in told
    code, told = job()
    assert code == 76
    assert (
        "given up: the run was lost 3 times after step 5, 2 of them in jobs before this\n" in told
    )
    assert job()[0] == 75, "whoever does it nevertheless begins anew"


@pytest.mark.parametrize("options", [(), ("--fork",)])
def test_a_folder_of_logs_that_cannot_be_made_ends_no_run(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """As on a full disk."""
    (tmp_path / "again.py").write_text(
        "import os, pathlib, sys\n"
        "again = os.environ.get('FIVEFOLD_RESTART', '0')\n"
        "print('start', again, flush=True)\n"
        "pathlib.Path('logs/restart-1').touch()\n"
        "sys.exit(again == '0')\n"
    )
    words = ("run", "-n", "1", "--restarts", "1", "--log-dir", "logs", *options, "again.py")
    done = fivefold(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning: cannot write logs to logs/restart-1: File exists; " in done.stderr
    assert (tmp_path / "logs/rank-0.log").read_text() == "start 0\nstart 1\n"


@pytest.mark.parametrize("words", ["--stall 5parsecs", "--stall -1"])
def test_mistakes(words: str, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("print('never')\n")
    done = fivefold("run", *words.split(), "sleeps.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: --stall ")


TWO_RUNS = """
import os, sys
import torch
import fivefold as ff
restart = int(os.environ.get("FIVEFOLD_RESTART", 0))
with ff.start() as mesh:
    weight = torch.zeros(2)
    with ff.Checkpointer("teacher", mesh, local="near", weight=weight) as ckpt:
        step = ckpt.load() or 0
        print("teacher of step", step, flush=True)
        for step in range(step + 1, 9):
            ckpt.save(step)
            ckpt.wait()
    with ff.Checkpointer("student", mesh, local="near", every=2, weight=weight) as ckpt:
        step = ckpt.load() or 0
        print("student of step", step, flush=True)
        for step in range(step + 1, 8):
            if step == 6 and restart < 2:
                raise RuntimeError("lost in step 5")
            ckpt.maybe_save(step)
            ckpt.wait()
"""


@pytest.mark.long
def test_saves_of_another_run_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_RUNS)
    done = fivefold("run", "-n", "1", "--restarts", "3", "two.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line.rpartition(" ")[2] for line in done.stdout.splitlines()]
    assert told == ["0", "0", "8", "4", "8", "2"], done.stdout
