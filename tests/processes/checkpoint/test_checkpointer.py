"""Runs of two processes that are stopped or killed, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from fivefold.checkpoint.signals import STOPPED
from fivefold.checkpoint.store import PersistentStore
from fivefold.launch.environment import without_places
from fivefold.launch.port import reserved_port
from template import Forked, Order, Template

SCRIPT = Path(__file__).parents[2] / "checkpoint_run.py"
TIMEOUT_S = 90.0
STEPS = 15


class Run:
    """The script on two ranks."""

    def __init__(self, template: Template, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._held = ExitStack()
        port = str(self._held.enter_context(reserved_port(None)))
        # Each run has files of its own: how the ranks of an earlier one ended lies beside their logs.
        logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
        logs.mkdir()
        self.logs = [logs / f"rank-{rank}.log" for rank in range(2)]
        self.processes: list[Forked] = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            environment = {
                **without_places(os.environ),
                **{name: str(value) for name, value in place.items()},
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "FIVEFOLD_LEASE_S": "3",
            }  # fmt: skip
            argv = [str(SCRIPT), str(folder), *options]
            order = Order(argv, environment, folder=str(folder), log=str(log), node=None)
            self.processes.append(template.start(order))

    def text(self, rank: int) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def told(self) -> str:
        return "\n".join(f"rank {rank}:\n{self.text(rank)}" for rank in range(2))

    def until(self, word: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not all(word in self.text(rank) for rank in range(2)):
            assert time.monotonic() < end, f"no {word!r}\n{self.told()}"
            assert all(p.poll() in (None, 0) for p in self.processes), self.told()
            time.sleep(0.02)

    def ends(self) -> list[int]:
        with self._held:
            return [process.wait(TIMEOUT_S) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
        self.ends()

    def steps(self, rank: int) -> dict[int, str]:
        found = re.findall(r"^step (\d+) pid \d+ (\w+)$", self.text(rank), re.MULTILINE)
        return {int(step): digest for step, digest in found}

    def final(self) -> list[str]:
        assert self.ends() == [0, 0], self.told()
        return [re.findall(r"^final (\w+)$", self.text(rank), re.MULTILINE)[0] for rank in range(2)]


Starting = Callable[..., Run]


@pytest.fixture(scope="module")
def through(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody stopped."""
    run = Run(template, tmp_path_factory.mktemp("runs") / "through")
    run.final()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture
def start(template: Template, folder: Path) -> Starting:
    return partial(Run, template, folder)


def goes_on(start: Starting, through: Run, after: int) -> None:
    """From `after`, the steps and the end are those of the run that nobody stopped."""
    again = start()
    assert again.final() == through.final(), again.told()
    for rank in range(2):
        expected = {n: d for n, d in through.steps(rank).items() if n > after}
        assert again.steps(rank) == expected


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_makes_all_save_and_end(
    start: Starting, folder: Path, through: Run, number: signal.Signals
) -> None:
    run = start("--every", "100", "--pause", "0.05")
    run.until("step 4 ")
    os.kill(run.processes[1].pid, number)
    assert run.ends() == [STOPPED, STOPPED], run.told()
    last = max(run.steps(0))
    [saved] = PersistentStore(folder / "far").generations()
    assert saved.step in (last, last + 1) and 4 <= saved.step < STEPS
    goes_on(start, through, saved.step)


@pytest.mark.long
def test_a_signal_is_noticed_in_validation(start: Starting, through: Run) -> None:
    run = start("--validate")
    run.until("step 6 ")
    os.kill(run.processes[0].pid, signal.SIGUSR1)
    assert run.ends() == [STOPPED, STOPPED], run.told()
    goes_on(start, through, 6)


@pytest.mark.long
def test_processes_that_are_killed_go_on_from_their_last_save(
    start: Starting, through: Run
) -> None:
    run = start("--every", "2", "--pause", "0.1")
    run.until("step 9 ")
    run.kill()
    again = start()
    assert again.final() == through.final(), again.told()
    first = min(again.steps(0))
    assert first in (7, 9, 11) and again.steps(0)[first] == through.steps(0)[first]


@pytest.mark.long
def test_two_jobs_do_not_write_to_one_directory(start: Starting) -> None:
    run = start("--pause", "2")
    run.until("step 1 ")
    other = start()
    assert other.ends() == [1, 1]
    assert all("is written to by process" in other.text(rank) for rank in range(2)), other.told()
    run.kill()
