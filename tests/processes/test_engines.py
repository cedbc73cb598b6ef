"""What every engine promises, asked of all of them with real processes: local, torchrun and both MPIs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import mpis
from commands import CLEAN, python, starting
from machines import pretended
from waiting import alive, awaited

# Generous: the machine may be busy. What the house promises (5 s) is checked on its own.
TIMEOUT_S = 60.0
PROMISED_S = 5.0


PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(sys.argv[1])

def ready(*others):
    pids = [os.getpid(), *others]
    (here / f"{rank}.tmp").write_text(json.dumps(pids))
    (here / f"{rank}.tmp").rename(here / f"{rank}.pids")

def all_ready():
    while len(list(here.glob("*.pids"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

def family():  # a child and a grandchild, as a loader's workers would be
    child = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE)
    ready(child.pid, int(child.stdout.readline()))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["local", "torchrun", "openmpi", "mpich"])
def engine(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """The `--engine` to name, and what to add to the environment."""
    name: str = request.param
    if name in ("local", "torchrun"):
        return name, {}
    return "mpirun", {"FIVEFOLD_MPIRUN": str(mpis.find(name))}


@pytest.fixture
def start(tmp_path: Path, engine: tuple[str, dict[str, str]]) -> Iterator[Start]:
    """Start `fivefold run -n 2` of a script with this engine; the script's argument is `tmp_path`."""
    with starting() as begin:

        def launch(body: str, *options: str, **variables: str) -> subprocess.Popen[str]:
            script = tmp_path / "script.py"
            script.write_text(PREAMBLE + body)
            command = [python(), "-m", "fivefold", "run", "-n", "2", "--engine", engine[0]]
            command += ["--log-dir", str(tmp_path / "logs"), *options, str(script), str(tmp_path)]
            return begin(command, CLEAN | engine[1] | variables, tmp_path)

        # A suite that runs in the background ignores Ctrl-C, and so would all that it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield launch
        signal.signal(signal.SIGINT, before)
    for pid in pids(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_ranks_have_cores_of_their_own_near_their_memory(start: Start, tmp_path: Path) -> None:
    granted = sorted(os.sched_getaffinity(0))
    half = len(granted) // 2
    near = pretended(tmp_path, [granted[:half], granted[half:]])
    code, out, err = finish(start("print(sorted(os.sched_getaffinity(0)))", **near))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[0] {granted[:half]}", f"[1] {granted[half:]}"]


def pids(folder: Path) -> list[int]:
    return [pid for path in folder.glob("*.pids") for pid in json.loads(path.read_text())]


def wait_until_ready(folder: Path, ranks: int = 2) -> None:
    awaited(lambda: len(list(folder.glob("*.pids"))) == ranks, "all ranks to start", TIMEOUT_S)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


@pytest.mark.long
def test_ranks_output_and_logs(start: Start, tmp_path: Path) -> None:
    lines = 300
    script = f"""
from fivefold.launch import locate
print(json.dumps([list(vars(locate()).values())[:4], os.environ["GIVEN"], sys.argv[2:]]))
for n in range({lines}):
    print(f"{{n}} " + "o" * 200)
    print(f"{{n}} " + "e" * 200, file=sys.stderr)
print("no newline", end="")
"""
    # -x reaches every rank, and what follows the script belongs to it.
    process = start(script, "-x", "GIVEN=two words")
    code, out, err = finish(process)
    assert (code, process.returncode) == (0, 0), err
    shown = out.splitlines()
    for rank in (0, 1):
        mine = [line[4:] for line in shown if line.startswith(f"[{rank}] ")]
        assert json.loads(mine[0]) == [[rank, 2, rank, 2], "two words", []]
        assert mine[1:] == [f"{n} " + "o" * 200 for n in range(lines)] + ["no newline"]
        told = [line[4:] for line in err.splitlines() if line.startswith(f"[{rank}] ")]
        assert told == [f"{n} " + "e" * 200 for n in range(lines)]
        log = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert log.count("o" * 200) == log.count("e" * 200) == lines
        assert "[0]" not in log
    assert len(shown) == 2 * (lines + 2)
    assert len(err.splitlines()) == 2 * lines


@pytest.mark.long
def test_a_rank_that_fails_ends_the_others(start: Start, tmp_path: Path) -> None:
    process = start("""
family()
all_ready()
if rank == 1:
    print("the reason", file=sys.stderr)
    (here / "failed").touch()
    sys.exit(3)
while True:
    print("busy")
""")
    code, _, err = finish(process)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < PROMISED_S
    assert code == 3
    assert "rank 1 of 2 exited with code 3; the other ranks were stopped" in err
    assert re.search(r"last lines of .*rank-1\.log:\n    the reason\n", err)
    awaited(lambda: not any(map(alive, pids(tmp_path))), "all processes to be gone", 1.0)


@pytest.mark.long
def test_a_rank_that_is_killed_ends_even_stubborn_others(start: Start, tmp_path: Path) -> None:
    process = start("""
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
family()
all_ready()
if rank == 0:
    (here / "failed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
""")
    code, _, err = finish(process)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < PROMISED_S
    assert code == 128 + signal.SIGKILL
    assert "rank 0 of 2 was killed by SIGKILL" in err
    awaited(lambda: not any(map(alive, pids(tmp_path))), "all processes to be gone", 1.0)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_leaves_nothing(
    start: Start, tmp_path: Path, signum: signal.Signals
) -> None:
    process = start("family()\nall_ready()\ntime.sleep(300)\n")
    wait_until_ready(tmp_path)
    mine = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == 128 + signum
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert "all 2 ranks were stopped" in err and "Traceback" not in err
    awaited(lambda: not any(map(alive, {*mine, *pids(tmp_path)})), "all processes to be gone", 1.0)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("all_save", [True, False])
def test_ranks_that_save_when_the_launcher_is_stopped_can_go_on(
    start: Start, tmp_path: Path, all_save: bool
) -> None:
    code = 75 if all_save else "75 if rank else 1"
    process = start(f"""
asked = []
def save(*_):  # which takes longer than torchrun and mpirun wait, on one rank longer than on the other
    asked.append(True)
    time.sleep(0.5 + 2.0 * rank)
    sys.exit({code} if len(asked) == 1 else "asked again")

signal.signal(signal.SIGTERM, save)
ready()
all_ready()
time.sleep(300)
""", FIVEFOLD_GRACE_S="60")  # fmt: skip
    wait_until_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    ended, _, err = finish(process)
    assert ended == (75 if all_save else 128 + signal.SIGTERM), err
    assert ("the same command goes on from there" in err) == all_save


@pytest.mark.long
def test_a_signal_of_the_user_reaches_every_rank_once(start: Start, tmp_path: Path) -> None:
    process = start("""
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(rank))
ready()
while not asked:
    time.sleep(0.01)
time.sleep(1.0)
sys.exit(0 if asked == [rank] else f"asked {asked}")
""")
    wait_until_ready(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == (0, "", "")


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing(start: Start, tmp_path: Path) -> None:
    process = start("family()\nall_ready()\ntime.sleep(300)\n")
    wait_until_ready(tmp_path)
    mine = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.kill()
    awaited(
        lambda: not any(map(alive, {*mine, *pids(tmp_path)})), "processes to be gone", PROMISED_S
    )


@pytest.mark.long
def test_the_mistake_of_a_user_is_told_once(start: Start) -> None:
    process = start("""
ready()
all_ready()
print("error: there is no such folder", file=sys.stderr)
sys.exit(2)
""")
    assert finish(process) == (2, "", "error: there is no such folder\n")


@pytest.mark.long
def test_ranks_start_again_and_mpirun_is_called_again_for_that(
    start: Start, engine: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    process = start(
        """
import psutil, re
restart = int(os.environ.get("FIVEFOLD_RESTART", 0))
above = [one for one in psutil.Process().parents() if re.search("(mpi|prte)run", str(one.cmdline()[:2]))]
(here / f"{rank}-{restart}.above").write_text(json.dumps([one.pid for one in above]))
ready()
all_ready()
sys.exit(not restart)
""",
        "--restarts",
        "1",
    )
    code, _, err = finish(process)
    assert code == 0 and "\nrestart 1 of 1 now\n" in err, err
    above = [
        [set(json.loads(path.read_text())) for path in tmp_path.glob(f"*-{restart}.above")]
        for restart in (0, 1)
    ]
    assert [len(ranks) for ranks in above] == [2, 2]
    calls = [set.intersection(*ranks) for ranks in above]
    assert [bool(call) for call in calls] == [engine[0] == "mpirun"] * 2
    assert not calls[0] & calls[1]
