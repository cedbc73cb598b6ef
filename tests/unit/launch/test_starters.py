"""What starts agents again, and what is no longer guarded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fivefold.launch.agent_listener import AgentStart, AgentStarters
from fivefold.launch.guard import Guard
from fivefold.launch.job import ProcessStart
from fivefold.launch.supervisor import Supervised
from waiting import awaited


class Supervisor:
    """Of processes whose end it looks for when it is told."""

    def __init__(self) -> None:
        self.processes: list[tuple[Supervised, Callable[[int], None]]] = []
        self.forgotten: list[int] = []

    def start(self, process: Supervised, over: Callable[[int], None]) -> None:
        self.processes.append((process, over))

    def reap(self) -> None:
        process, over = self.processes.pop()
        over(process.wait())


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor()
    yield made
    for process, _ in made.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def begun(
    supervisor: Supervisor, folder: Path, *nodes: int
) -> tuple[AgentStarters, list[tuple[int, ...]]]:
    failed: list[tuple[int, ...]] = []
    starters = AgentStarters(supervisor.start, supervisor.forgotten.append)
    sleeps = ProcessStart(["sleep", "60"], dict(os.environ))
    starters.start(AgentStart(sleeps, nodes), folder / "log", lambda n, _: failed.append(tuple(n)))
    return starters, failed


def test_what_started_the_agents_of_several_nodes_goes_on_without_one(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    starters, failed = begun(supervisor, tmp_path, 0, 1)
    starters.again(0, -1.0)
    starters.end(0)
    ((process, _),) = supervisor.processes
    time.sleep(0.3)
    assert process.poll() is None and not failed


def test_an_agent_that_takes_long_to_call_has_its_time(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    starters, failed = begun(supervisor, tmp_path, 3)
    starters.again(3, 60.0)
    assert supervisor.processes[0][0].poll() is None
    starters.again(3, -1.0)  # and no more
    pid = supervisor.processes[0][0].pid
    supervisor.reap()
    assert failed == [(3,)] and supervisor.forgotten == [pid]
    starters.again(3, 60.0)
    assert supervisor.processes[0][0].poll() is None and 3 in starters.running


def test_a_guard_ends_only_what_it_still_has() -> None:
    guard = Guard()
    sleeps = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
    for process, after_s in zip(sleeps, (0.0, 0.0, 0.5), strict=True):
        guard.add(process.pid, after_s)
    guard.drop(sleeps[1].pid)
    shell: subprocess.Popen[bytes] = vars(guard)["_shell"]
    assert shell.stdin is not None
    shell.stdin.close()
    awaited(lambda: sleeps[0].poll() is not None, "the guard to end one", 10.0)
    assert sleeps[2].poll() is None, "it has its time"
    awaited(lambda: sleeps[2].poll() is not None, "the guard to end another", 10.0)
    assert shell.wait(10.0) is not None
    assert sleeps[1].poll() is None
    sleeps[1].kill()
    sleeps[1].wait()
