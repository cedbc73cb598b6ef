"""The torchrun engine: torch's own launcher starts the ranks, on this node."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

from fivefold.launch.job import Job, Outcome, ProcessStart
from fivefold.launch.port import reserved_port
from fivefold.launch.relay import run_through, shim_command

__all__ = ["TorchrunEngine"]


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
        with reserved_port(job.port) as port:
            run_through(job, self.name, self.name, lambda fifo: self._start(job, port, fifo))
        return Outcome(job.processes, time.monotonic() - began)

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
