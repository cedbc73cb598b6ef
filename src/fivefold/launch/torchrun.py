"""The torchrun engine: torch's own launcher starts the ranks, on this node."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

from fivefold.launch.job import Job, Outcome
from fivefold.launch.port import reserved_port
from fivefold.launch.relay import run_through

__all__ = ["TorchrunEngine"]


class TorchrunEngine:
    """Starts `python -m torch.distributed.run`, never restarting a rank."""

    name = "torchrun"

    def unavailable(self) -> str | None:
        """A reason if torch is not installed."""
        return None if find_spec("torch") else "torch is not installed; pip install torch"

    def run(self, job: Job) -> Outcome:
        """Run `job`; see `Engine.run`."""
        began = time.monotonic()
        with reserved_port(job.port) as port:

            def command(shim: Sequence[str]) -> list[str]:
                options = [
                    f"--nproc-per-node={job.processes}",
                    "--max-restarts=0",
                    "--master-addr=127.0.0.1",
                    f"--master-port={port}",
                    "--no-python",
                ]
                return [sys.executable, "-m", "torch.distributed.run", *options, "--", *shim]

            run_through(job, self.name, command, job.rank_environment(self.name))
        return Outcome(job.processes, time.monotonic() - began)
