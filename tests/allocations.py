"""Stand-ins for what a site has and this machine has not: Slurm, PBS with Cray PALS, flux.

A launcher starts two tasks, whatever it is asked for, as it would on one node: each with the variables that
`fivefold.launch.environment` reads of it. A signal goes to all of them, and the highest of their codes is its
own. Commands that queue jobs write down what they were told.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["TASKS", "queued", "stand_in"]

TASKS = 2
_ALL = str(TASKS)
_LAUNCHERS = ("srun", "mpiexec", "flux")


def _place(launcher: str, rank: str) -> dict[str, str]:
    """What a task finds in its environment, after tests/unit/launch/recorded."""
    if launcher == "srun":
        return {
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": _ALL, "SLURM_STEP_TASKS_PER_NODE": _ALL,
            "SLURM_STEP_NODELIST": os.uname().nodename, "SLURM_NTASKS": _ALL, "SLURM_NODEID": "0",
            "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
        }  # fmt: skip
    if launcher == "mpiexec":
        return {
            "PALS_RANKID": rank, "PALS_SIZE": _ALL, "PALS_LOCAL_RANKID": rank, "PALS_LOCAL_SIZE": _ALL,
            "PALS_APID": "6a0b3c1e-7d0e-4b57",
        }  # fmt: skip
    return {
        "FLUX_TASK_RANK": rank, "FLUX_JOB_SIZE": _ALL, "FLUX_TASK_LOCAL_ID": rank,
        "FLUX_JOB_NNODES": "1", "FLUX_JOB_ID": "f3ETxsR9H",
    }  # fmt: skip


def _launch(launcher: str, words: list[str]) -> int:
    command = [sys.executable, *words[words.index("python") + 1 :]]
    places = [_place(launcher, str(rank)) for rank in range(TASKS)]
    tasks = [subprocess.Popen(command, env=os.environ | place) for place in places]

    def pass_on(number: int, _frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGUSR1, pass_on)
    return max(task.wait() for task in tasks)


def stand_in(folder: Path, *names: str) -> None:
    """Put commands of these names into `folder`."""
    folder.mkdir(exist_ok=True)
    for name in names:
        here = shlex.join([sys.executable, __file__, name])
        does = f'exec {here} "$@"' if name in _LAUNCHERS else f'echo "{name} $*" >> {folder}/queued'
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)


def queued(folder: Path) -> str:
    """What the commands that queue jobs were told, a line for each."""
    told = folder / "queued"
    return told.read_text() if told.exists() else ""


if __name__ == "__main__":
    sys.exit(_launch(sys.argv[1], sys.argv[2:]))
