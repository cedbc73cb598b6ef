"""Runs of two processes that are stopped or killed, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fivefold.checkpoint.signals import STOPPED
from fivefold.checkpoint.store import PersistentStore
from fivefold.launch.environment import without_places
from fivefold.launch.port import reserved_port

SCRIPT = Path(__file__).parents[2] / "checkpoint_run.py"
TIMEOUT_S = 90.0
STEPS = 15


class Run:
    """The script on two ranks."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._held = ExitStack()
        port = str(self._held.enter_context(reserved_port(None)))
        self.logs = [folder / f"rank-{rank}.log" for rank in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            environment = {
                **without_places(os.environ),
                **{name: str(value) for name, value in place.items()},
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "FIVEFOLD_LEASE_S": "3",
            }  # fmt: skip
            with log.open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), str(folder), *options],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def text(self, rank: int) -> str:
        return self.logs[rank].read_text()

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
            process.kill()
        self.ends()

    def steps(self, rank: int) -> dict[int, str]:
        found = re.findall(r"^step (\d+) pid \d+ (\w+)$", self.text(rank), re.MULTILINE)
        return {int(step): digest for step, digest in found}

    def final(self) -> list[str]:
        assert self.ends() == [0, 0], self.told()
        return [re.findall(r"^final (\w+)$", self.text(rank), re.MULTILINE)[0] for rank in range(2)]


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nobody stopped."""
    run = Run(tmp_path_factory.mktemp("runs") / "through")
    run.final()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def goes_on(folder: Path, through: Run, after: int) -> None:
    """From `after`, the steps and the end are those of the run that nobody stopped."""
    again = Run(folder)
    assert again.final() == through.final(), again.told()
    for rank in range(2):
        expected = {n: d for n, d in through.steps(rank).items() if n > after}
        assert again.steps(rank) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_makes_all_save_and_end(
    folder: Path, through: Run, number: signal.Signals
) -> None:
    run = Run(folder, "--every", "100", "--pause", "0.05")
    run.until("step 4 ")
    run.processes[1].send_signal(number)
    assert run.ends() == [STOPPED, STOPPED], run.told()
    last = max(run.steps(0))
    [saved] = PersistentStore(folder / "far").generations()
    assert saved.step in (last, last + 1) and 4 <= saved.step < STEPS
    goes_on(folder, through, saved.step)


def test_a_signal_is_noticed_in_validation(folder: Path, through: Run) -> None:
    run = Run(folder, "--validate")
    run.until("step 6 ")
    run.processes[0].send_signal(signal.SIGUSR1)
    assert run.ends() == [STOPPED, STOPPED], run.told()
    goes_on(folder, through, 6)


def test_processes_that_are_killed_go_on_from_their_last_save(folder: Path, through: Run) -> None:
    run = Run(folder, "--every", "2", "--pause", "0.1")
    run.until("step 9 ")
    run.kill()
    again = Run(folder)
    assert again.final() == through.final(), again.told()
    first = min(again.steps(0))
    assert first in (7, 9, 11) and again.steps(0)[first] == through.steps(0)[first]


def test_two_jobs_do_not_write_to_one_directory(folder: Path) -> None:
    run = Run(folder, "--pause", "2")
    run.until("step 1 ")
    logs = run.logs
    for log in logs:
        log.rename(log.with_suffix(".first"))
    other = Run(folder)
    assert other.ends() == [1, 1]
    assert all("is written to by process" in other.text(rank) for rank in range(2)), other.told()
    run.kill()
