"""What every engine for several nodes promises of nodes that are lost, with real processes on three."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from commands import starting
from engine_places import ENGINES, Place, place_of
from waiting import awaited, launcher

TIMEOUT_S = 60.0
SCRIPT = """
import os, sys, time
from pathlib import Path
here, rank, again = Path(sys.argv[1]), os.environ["RANK"], "FIVEFOLD_RESTART" in os.environ
(here / f"{rank}.ready").touch()
time.sleep(3 if again else 300)  # long enough for an engine to end what it has started
print("well")
"""
SAVES = """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
def save(*_):
    time.sleep(3 if rank == "5" else 0.1)
    (here / f"{rank}.saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(here / f"{rank}.ready").touch()
time.sleep(300)
"""


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place_of(request.param, tmp_path, 3) as made:
        yield made


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(place: Place, tmp_path: Path) -> Iterator[Start]:
    """Start `fivefold run` of a script on all nodes; the script's argument is `tmp_path`."""
    with starting() as begin:

        def launch(body: str, *options: str) -> subprocess.Popen[str]:
            (tmp_path / "script.py").write_text(body)
            command = [sys.executable, "-m", "fivefold", "run", "--log-dir", str(tmp_path / "logs")]
            words = [*place.before(tmp_path), *command, *place.where, *options]
            return begin([*words, "script.py", str(tmp_path)], place.environ, tmp_path)

        yield launch
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)


def ready(folder: Path, ranks: int) -> None:
    awaited(lambda: len([*folder.glob("*.ready")]) == ranks, "all ranks to start", TIMEOUT_S)


def kill_agent(place: Place, node: int) -> None:
    """End the agent of a node with ranks by the signal that nobody handles."""
    agents: list[int] = []
    for rank in map(psutil.Process, place.processes()):
        above = rank.parents()
        forked = any("launch.template" in word for word in above[0].cmdline())
        if forked or "RANK" in rank.environ():
            agents += [one.pid for one in above if "fivefold.launch.agent" in one.cmdline()][:1]
    os.kill(sorted(set(agents))[node], signal.SIGKILL)


@pytest.mark.parametrize(
    "lose", [lambda place, node: place.lose(node), kill_agent], ids=["node", "agent"]
)
def test_a_spare_takes_the_place(
    lose: Callable[[Place, int], None], start: Start, place: Place, tmp_path: Path
) -> None:
    job = start(SCRIPT, "--spares", "1", "--restarts", "1")
    ready(tmp_path, 4)
    lose(place, 1)
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, err
    assert re.search("note: node .* takes the place of", err)
    assert sorted(re.findall(r"\[(\d)\] well", out)) == ["0", "1", "2", "3"]


def test_a_launcher_that_is_killed_leaves_ranks_the_time_to_save(
    start: Start, place: Place, tmp_path: Path
) -> None:
    job = start(SAVES)
    ready(tmp_path, 6)
    launcher(job).kill()
    job.communicate(timeout=TIMEOUT_S)
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)
    assert len([*tmp_path.glob("*.saved")]) == 6


@pytest.mark.long
def test_slurm_is_asked_to_spare_the_nodes_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("3 if", "300 if"))
    with place_of("srun", tmp_path, 3) as place, starting() as begin:
        before = [word for word in place.before(tmp_path) if word != "--no-kill"]
        command = [
            *before,
            sys.executable,
            "-m",
            "fivefold",
            "run",
            "--spares",
            "1",
            "--restarts",
            "3",
        ]
        job = begin([*command, "script.py", str(tmp_path)], place.environ, tmp_path)
        ready(tmp_path, 4)
        place.lose(1)
        _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 1, err
    assert re.search(
        r"error: .*\n.*Slurm ended those of all others: .*with --no-kill", err, re.DOTALL
    ), err
    assert err.count("\nrestart ") <= 1
