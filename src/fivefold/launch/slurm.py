"""What Slurm tells a process about the step it runs in.

An allocation (salloc, sbatch) is full of variables that look like ranks: the batch script has
SLURM_PROCID=0, the shell of salloc has SLURM_NTASKS=4. Only a *step*, started by srun, makes ranks, so
only the step's own variables count.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

from fivefold.errors import UsageError

__all__ = [
    "first_node",
    "in_step",
    "meeting_port",
    "refuse_forgotten_srun",
    "requeued",
    "step_name",
    "tasks_here",
]

Environ = Mapping[str, str]

# Slurm numbers its own steps from here: 4294967290 interactive, ...291 batch, ...292 extern, ...
_FIRST_SPECIAL_STEP = 4294967290


def in_step(environ: Environ) -> bool:
    """Whether srun started this process as one of the tasks that the allocation was made for."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP or not environ.get("SLURM_PROCID"):
        return False
    if environ.get("FLUX_URI"):
        return False  # a flux instance, whose brokers srun started; its tasks have FLUX_TASK_RANK
    # A shell on the allocation (srun -n1 --preserve-env --pty bash) is a step of one task that
    # still carries the number of tasks of the allocation.
    return _tasks_of_step(environ) > 1 or environ.get("SLURM_NTASKS", "1") == "1"


def refuse_forgotten_srun(environ: Environ) -> None:
    """Raise `UsageError` if the allocation has several tasks and this process is none of them."""
    tasks = _tasks_of_allocation(environ)
    if environ.get("SLURM_JOB_ID") and tasks > 1 and not environ.get("FLUX_URI"):
        raise UsageError(
            f"this Slurm allocation has {tasks} tasks, but this process was not started by srun: it would "
            "train alone. Start the script with `srun python ...`, or on this node alone with "
            f"`fivefold run -n {tasks} ...`; if one process is what you want, set FIVEFOLD_ENGINE=alone"
        )


def step_name(environ: Environ) -> str:
    """Job and step, `12.0`: different for any two steps of a cluster."""
    return f"{environ.get('SLURM_JOB_ID', '?')}.{environ.get('SLURM_STEP_ID', '?')}"


def requeued(environ: Environ = os.environ) -> tuple[str, int] | None:
    """Job, and how often Slurm has requeued it; None outside of jobs. All earlier starts have ended.

    >>> requeued({"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "hpc", "SLURM_RESTART_COUNT": "2"})
    ('12@hpc', 2)
    >>> requeued({"SLURM_JOB_ID": "12"}), requeued({})
    (('12', 0), None)
    """
    job, times = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not times.isdecimal():
        return None
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    return (f"{job}@{cluster}" if cluster else job), int(times)


def tasks_here(environ: Environ) -> int:
    """Tasks of the step on this node, from SLURM_STEP_TASKS_PER_NODE such as `4(x2),3`."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(
                f"cannot read SLURM_STEP_TASKS_PER_NODE={text}: expected such as 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    if not node.isdecimal() or int(node) >= len(counts):
        raise UsageError(f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE={text}")
    return counts[int(node)]


def first_node(environ: Environ) -> str:
    """The first host of the step, from a list such as `gpu[003-005,010]`; empty if there is none."""
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # The first name ends at the first comma outside brackets; inside, the first number counts.
    match = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else ""


def meeting_port(environ: Environ) -> int:
    """A port that all tasks of the step agree on and that two steps rarely share: 20000 to 29999."""
    return 20000 + zlib.crc32(step_name(environ).encode()) % 10000


def _tasks_of_step(environ: Environ) -> int:
    text = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    return int(text) if text.isdecimal() else 1


def _tasks_of_allocation(environ: Environ) -> int:
    text = environ.get("SLURM_NTASKS") or environ.get("SLURM_NPROCS", "")
    if text.isdecimal():
        return int(text)
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    return int(per_node) * int(nodes) if per_node.isdecimal() and nodes.isdecimal() else 1
