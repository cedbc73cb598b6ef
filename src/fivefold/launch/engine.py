"""What can start a job. Adding an engine means one class with four members and one line here.

All engines pass the same test, tests/processes/test_engines.py.
"""

from __future__ import annotations

from typing import Protocol

from fivefold.errors import UsageError, suggest
from fivefold.launch.job import Job, Outcome, ProcessStart
from fivefold.launch.local import LocalEngine
from fivefold.launch.mpirun import MpirunEngine
from fivefold.launch.torchrun import TorchrunEngine

__all__ = ["Engine", "choose", "engines"]


class Engine(Protocol):
    """Starts the processes of a job and sees to it that they end together."""

    @property
    def name(self) -> str:
        """What `--engine` calls it."""
        ...

    def unavailable(self) -> str | None:
        """Why this engine cannot be used here and what to do about it; None if it can."""
        ...

    def starts(self, job: Job, port: int) -> list[ProcessStart]:
        """What `run` starts, if the ranks meet at `port`: one process per rank, or one that starts them all.

        The named pipe on which ranks of torchrun and mpirun report is left out; they run without it.
        Raises `UsageError` if the engine cannot be used.
        """
        ...

    def run(self, job: Job) -> Outcome:
        """Run `job` to its end; nothing of it is left running, however it ends.

        Raises `RankFailure` if a rank fails, `UsageError` if it ended with code 2 after `error: ...`,
        `Resumable` if it ended with code 75, `Stopped` if a signal ended the launcher, `LaunchError` if the
        ranks could not be started.
        """
        ...


def engines() -> dict[str, Engine]:
    """All engines by name."""
    known: list[Engine] = [LocalEngine(), TorchrunEngine(), MpirunEngine()]
    return {engine.name: engine for engine in known}


def choose(name: str = "auto") -> Engine:
    """The engine called `name`; "auto" is the local one.

    Raises `UsageError` if there is no such engine or if it cannot be used here.
    """
    known = engines()
    if name == "auto":
        return known["local"]
    if name not in known:
        raise UsageError(f"unknown engine {name!r}{suggest(name, ['auto', *known])}")
    if reason := known[name].unavailable():
        raise UsageError(f"the {name} engine cannot be used: {reason}")
    return known[name]
