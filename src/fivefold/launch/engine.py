"""What can start a job. Adding an engine means one class with four members and one line here.

All engines pass the same test, tests/processes/test_engines.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fivefold.errors import UsageError, suggest
from fivefold.launch.job import Job, Outcome, ProcessStart
from fivefold.launch.local import LocalEngine
from fivefold.launch.mpirun import MpirunEngine
from fivefold.launch.port import reserved_port
from fivefold.launch.relay import run_through, shim_command
from fivefold.launch.restarts import restarting
from fivefold.launch.sharing import sharing

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


def engines(*, several_nodes: bool = False) -> dict[str, Engine]:
    """All engines by name, of those for one node or for several."""
    known: list[Engine] = [LocalEngine(), TorchrunEngine(), MpirunEngine()]
    if several_nodes:
        # Only then: who starts two ranks on this node needs neither channels nor agents.
        from fivefold.launch import node_engines as several

        known = [
            several.SrunEngine(),
            several.SshEngine(),
            several.FluxEngine(),
            several.PalsEngine(),
            several.MpiNodesEngine(),
        ]
    return {engine.name: engine for engine in known}


def choose(
    name: str = "auto",
    *,
    several_nodes: bool = False,
    local: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Engine:
    """The engine called `name`; "auto" is local, on several nodes the scheduler's, else a remote shell.

    With `local` it has to reach no other node. Raises `UsageError` if there is no such engine or if it cannot
    be used here.
    """
    known = engines(several_nodes=several_nodes)
    if name == "auto":
        return known[_automatic(known, environ) if several_nodes else "local"]
    if name not in known:
        if name in engines(several_nodes=not several_nodes):
            where = (
                "one node only" if several_nodes else "several nodes only; on this one leave it out"
            )
            raise UsageError(f"the engine {name} is for {where}{suggest(name, ['auto', *known])}")
        raise UsageError(f"unknown engine {name!r}{suggest(name, ['auto', *known])}")
    if not local and (reason := known[name].unavailable()):
        raise UsageError(f"the {name} engine cannot be used: {reason}")
    return known[name]


def _automatic(known: Mapping[str, Engine], environ: Mapping[str, str]) -> str:
    """For several nodes. A flux instance may fill an allocation of Slurm, of which it knows its part."""
    if environ.get("FLUX_URI") and known["flux"].unavailable() is None:
        return "flux"
    if environ.get("SLURM_JOB_ID") and known["srun"].unavailable() is None:
        return "srun"
    mpiexec = shutil.which("mpiexec") if environ.get("PBS_NODEFILE") else None
    if mpiexec is not None and "pals" in Path(mpiexec).resolve().parts:
        return "pals"
    return "ssh"


# ---- The torchrun engine: torch's own launcher starts the ranks, on this node


class TorchrunEngine:
    """Starts `python -m torch.distributed.run`, never restarting a rank."""

    name = "torchrun"

    def unavailable(self) -> str | None:
        """A reason if torch is not installed."""
        return None if find_spec("torch") else "torch is not installed; pip install torch"

    def starts(self, job: Job, port: int) -> list[ProcessStart]:
        """One torchrun; see `Engine.starts`."""
        return [self._start(job, port)]

    def run(self, job: Job) -> Outcome:
        """Run `job`; see `Engine.run`."""
        began = time.monotonic()
        restarting(job, self._once)
        return Outcome(job.processes, time.monotonic() - began)

    def _once(self, job: Job) -> None:
        with reserved_port(job.port) as port, sharing(job, self.name) as this:
            run_through(this, self.name, self.name, lambda fifo: self._start(this, port, fifo))

    def _start(self, job: Job, port: int, fifo: Path | None = None) -> ProcessStart:
        options = [
            f"--nproc-per-node={job.processes}",
            "--max-restarts=0",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            "--no-python",
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--"]
        return ProcessStart([*torchrun, *shim_command(job, fifo)], job.rank_environment(self.name))
