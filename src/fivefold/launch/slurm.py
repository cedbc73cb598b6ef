"""What Slurm tells a process about the step it runs in.

An allocation (salloc, sbatch) is full of variables that look like ranks: the batch script has
SLURM_PROCID=0, the shell of salloc has SLURM_NTASKS=4. Only a *step*, started by srun, makes ranks, so
only the step's own variables count.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.hosts import NAME

__all__ = [
    "REMEDY",
    "counts",
    "ended_with_node",
    "expanded",
    "first_node",
    "in_step",
    "meeting_port",
    "refuse_forgotten_srun",
    "requeue",
    "requeued",
    "step_name",
    "tasks_here",
]

Environ = Mapping[str, str]

REMEDY = "name the hosts yourself, by -H or --hostfile"
_MOST_HOSTS = 65_536
_REQUEUE_S = 60.0
# A name may hold several brackets: rack[1-2]node[07-09].site.org
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([1-9][0-9]{0,4})(?:\(x([1-9][0-9]{0,4})\))?")

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


def requeue(environ: Environ = os.environ) -> str:
    """Have Slurm queue this job again, which ends it. Returns why it does not, or nothing."""
    job = environ.get("SLURM_JOB_ID", "")
    if environ.get("SLURM_ARRAY_JOB_ID") == job:
        job = f"{job}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"  # else it would be the whole array
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_REQUEUE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    said = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


def ended_with_node(log: Path) -> bool:
    """Whether Slurm has ended a step since a node failed, from what srun says."""
    with contextlib.suppress(OSError):
        return "DUE TO NODE FAILURE" in log.read_text(errors="replace")
    return False


def tasks_here(environ: Environ) -> int:
    """Tasks of the step on this node, from SLURM_STEP_TASKS_PER_NODE such as `4(x2),3`."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    told = counts(text, "SLURM_STEP_TASKS_PER_NODE")
    node = environ.get("SLURM_NODEID", "0")
    if not node.isdecimal() or int(node) >= len(told):
        raise UsageError(f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE={text}")
    return told[int(node)]


def first_node(environ: Environ) -> str:
    """The first host of the step, from a list such as `gpu[003-005,010]`; empty if there is none."""
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return expanded(text, "SLURM_STEP_NODELIST")[0] if text else ""


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


# ---- How Slurm writes lists of hosts, and of numbers


def expanded(text: str, name: str) -> tuple[str, ...]:
    """The hosts of a list as Slurm writes it; `name` says what lists them.

    Raises `UsageError` if that is no list, or if it has more than 65,536 hosts.

    >>> expanded("gpu[009-010],rack[1-2]n[7,9].org", "SLURM_JOB_NODELIST")
    ('gpu009', 'gpu010', 'rack1n7.org', 'rack1n9.org', 'rack2n7.org', 'rack2n9.org')
    """
    items = _ITEM.findall(text)
    if not text or ",".join(items) != text:
        raise _unreadable(name, text)
    hosts: list[str] = []
    for item in items:
        begun = [""]
        for number, piece in enumerate(_BRACKET.split(item)):
            # What stands in brackets comes at every second place.
            ends = _numbers(piece, name, text) if number % 2 else [piece]
            if len(hosts) + len(begun) * len(ends) > _MOST_HOSTS:
                raise _too_many(name)
            begun = [begin + end for begin in begun for end in ends]
        hosts += begun
    if not all(map(NAME.fullmatch, hosts)):
        raise _unreadable(name, text)
    return tuple(hosts)


def counts(text: str, name: str) -> tuple[int, ...]:
    """The tasks of each node from Slurm's shorthand, the value of the variable `name`.

    Raises `UsageError` if it is something else.

    >>> counts("4(x2),3", "SLURM_TASKS_PER_NODE")
    (4, 4, 3)
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match or len(found) + int(match[2] or 1) > _MOST_HOSTS:
            raise UsageError(f"cannot read {name}={text}: expected such as 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _numbers(text: str, name: str, whole: str) -> list[str]:
    """What the brackets around "003-005,010" stand for."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _unreadable(name, whole)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"cannot read {name}={whole}: {part} goes backwards; {REMEDY}")
        if len(found) + last - first >= _MOST_HOSTS:
            raise _too_many(name)
        # The first number tells how many digits all have: 008-010, but 8-10.
        found += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return found


def _unreadable(name: str, text: str) -> UsageError:
    return UsageError(
        f"cannot read {name}={text}: expected such as gpu[003-005,010],login1; {REMEDY}"
    )


def _too_many(name: str) -> UsageError:
    return UsageError(f"{name} names more than {_MOST_HOSTS:,} hosts; {REMEDY}")
