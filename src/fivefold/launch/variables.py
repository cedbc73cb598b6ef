"""Every environment variable that Fivefold reads or sets. No other name is looked up anywhere.

An explicit argument wins over a variable, a variable over the plan, the plan over a default.
The variables of other launchers (Open MPI, Slurm, ...) are in the table of `fivefold.launch.environment`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.errors import UsageError, suggest

__all__ = ["GIVEN", "READ", "Variable", "check_variables", "read_seconds"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it means, and what holds when it is not set."""

    name: str
    meaning: str
    default: str = ""
    choices: tuple[str, ...] = ()
    """all that it may be; empty: anything"""
    form: str = ""
    """regular expression of all that it may be; empty: anything"""


_ADDRESS = r"(unix:/[^,]+|[^,]+:\d{1,5})"
READ = (
    Variable(
        "FIVEFOLD_AGENTS_S",
        "seconds that the nodes of a job may take to answer `fivefold run`",
        "60",
    ),
    Variable(
        "FIVEFOLD_CRASH_AT",
        "for tests: where in a save or a recovery this process dies (`fivefold.checkpoint.files`)",
    ),
    Variable(
        "FIVEFOLD_DEBUG",
        "1 shows the traceback of errors that are one line otherwise",
        "0",
        ("0", "1"),
    ),
    Variable(
        "FIVEFOLD_END_S",
        "seconds before its time is up at which `fivefold run` asks the ranks to save and end; unless it is "
        "set, at most a tenth of that time, or twice what saving and copying took",
        "120",
    ),
    Variable(
        "FIVEFOLD_ENGINE",
        "which engine started this process, set for every rank; `alone` declares that this process "
        "is on its own, whatever the allocation around it says",
        choices=("alone", "local", "torchrun", "mpirun", "srun", "ssh", "flux", "pals"),
    ),
    Variable(
        "FIVEFOLD_GRACE_S",
        "seconds that ranks may take to end after Ctrl-C or SIGTERM, before they are killed; and the last "
        "copy of a save, where they do not start again",
        "5",
    ),
    Variable(
        "FIVEFOLD_HANG_S",
        "seconds after which a traced operation that has not ended is looked into; overrides trace.hang_s of "
        "the plan",
        "30",
    ),
    Variable(
        "FIVEFOLD_HELPERS",
        "addresses of the helpers that trainers connect to, such as `dpu01:21001,unix:/tmp/a.sock`; set by "
        "`fivefold run --helpers`",
        form=rf"{_ADDRESS}(,{_ADDRESS})*",
    ),
    Variable(
        "FIVEFOLD_HELPER_KEY",
        "64 hexadecimal digits by which trainers and helpers of a job know each other; set by "
        "`fivefold run --helpers`",
        form="[0-9A-Fa-f]{64}",
    ),
    Variable(
        "FIVEFOLD_LEASE_S",
        "seconds without a sign of life after which a job that saves to a directory counts as ended",
        "15",
    ),
    Variable("FIVEFOLD_MPIRUN", "path of the mpirun or mpiexec to use", "the first on PATH"),
    Variable(
        "FIVEFOLD_PLAN",
        "path of the plan file; set by `fivefold run` with `--plan`, `--layout` or `--set`",
    ),
    Variable("FIVEFOLD_RUN_DIR", "folder that recipes write their runs to", "runs"),
    Variable(
        "FIVEFOLD_ROLE",
        "what this process is for: `trainer`, or `helper`, as `fivefold helper` and `--helpers` set it",
        "trainer",
        ("trainer", "helper"),
    ),
    Variable(
        "FIVEFOLD_RSH",
        "command that starts something on another node, as `COMMAND HOST WORDS`; WORDS are for a shell there",
        "ssh -o BatchMode=yes",
    ),
    Variable(
        "FIVEFOLD_STAGE",
        "folder on each node's own storage for the copies of `fivefold run --stage`",
        "TMPDIR, or /tmp",
        form="/.*",
    ),
    Variable(
        "FIVEFOLD_TIMEOUT_S",
        "seconds that a collective may wait for a missing rank; overrides comm.timeout_s of the plan",
        "600",
    ),
    Variable(
        "FIVEFOLD_TRACE",
        "folder that each rank writes its trace to, in a script as it is; set by `fivefold run --trace`",
    ),
)
"""What a user may set."""

GIVEN = (
    Variable("RANK", "number of this process among all, from 0"),
    Variable("WORLD_SIZE", "how many processes the job has"),
    Variable("LOCAL_RANK", "number of this process on its node, from 0"),
    Variable("LOCAL_WORLD_SIZE", "how many processes of the job run on this node"),
    Variable("MASTER_ADDR", "host where the processes meet: that of rank 0"),
    Variable("MASTER_PORT", "TCP port where the processes meet"),
    Variable(
        "FIVEFOLD_AGENT_ADDRESSES",
        "addresses of `fivefold run`, for the agent that an engine starts on a node; in agents only",
    ),
    Variable("FIVEFOLD_AGENT_KEY", "by which the two know each other; in agents only"),
    Variable(
        "FIVEFOLD_INSTANCES",
        "how many neighbouring ranks share a GPU, or a node without any; with --instances",
        form=r"[1-9]\d*",
    ),
    Variable(
        "FIVEFOLD_MPS",
        "how many neighbouring ranks share a GPU, whether through MPS (`auto`, `on`, `off`), and how many "
        "percent of its threads each may use (0: all), such as `2:auto:0`; with --instances",
        form=r"[1-9]\d*:(auto|on|off):\d{1,3}",
    ),
    Variable(
        "FIVEFOLD_PLACEMENT",
        "folder of a node in which its ranks tell what they were given, before they become the script; with "
        "--explain on several nodes",
    ),
    Variable(
        "FIVEFOLD_PROGRESS",
        "file in which each rank of a node tells how far it is; with --restarts, --stall or a limit of time",
    ),
    Variable(
        "FIVEFOLD_BENCH_KEY",
        "by which the ranks of `fivefold bench` on several nodes and the command know each other",
    ),
    Variable(
        "FIVEFOLD_ENDS_AT",
        "who started the ranks of this node, and when their time is up by its clock: for another "
        "`fivefold run` within a rank; with --time-limit",
        form=r"\d+:\d+\.\d+",
    ),
    Variable(
        "FIVEFOLD_SUPERVISOR",
        "where the checkpoint agent of a node asks what follows when its ranks have ended; set by "
        "`fivefold run`",
    ),
    Variable("FIVEFOLD_RESTART", "how often the ranks were started again; not set at first"),
    Variable(
        "FIVEFOLD_LAUNCH",
        "which `fivefold run` has started the ranks: by it, who saves knows an earlier start of its own; set "
        "by `fivefold run`",
    ),
    Variable(
        "FIVEFOLD_RESUME_BEFORE",
        "the id of a run and a step: saves of it and of later ones are passed over, since the run was lost "
        "twice after them; set by `fivefold run --restarts`",
        form=r"[0-9a-f]+:\d+",
    ),
    Variable(
        "FIVEFOLD_STAGED",
        "by folder, where its copy lies on this node, as JSON; with --stage",
    ),
    Variable(
        "FIVEFOLD_HELPER_LISTEN",
        "address at which this helper listens, `HOST:PORT` or `unix:PATH`; in helpers only",
    ),
    Variable(
        "FIVEFOLD_HELPER_NUMBER",
        "number of this helper, from 0: its place in FIVEFOLD_HELPERS; in helpers only",
    ),
    Variable(
        "FIVEFOLD_LOG_DIR",
        "folder with the logs of all ranks; set by commands that start themselves in several processes",
    ),
    Variable(
        "FIVEFOLD_TRACE_SPOOL",
        "folder that ranks write their traces to instead, on a node that does not share that of the launcher",
    ),
    Variable("OMP_NUM_THREADS", "threads per process, unless the user set it", "cores / ranks"),
    Variable("PYTHONUNBUFFERED", "1, so that output appears line by line", "1"),
)
"""What every rank finds set when Fivefold started it, FIVEFOLD_ENGINE apart."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise `UsageError` for a name of ours that does not exist, and for a value that cannot be.

    What a launcher calls before it starts anything: every rank would find it, or none would.
    """
    known = {variable.name: variable for variable in (*READ, *GIVEN)}
    for name in sorted(name for name in environ if name.startswith("FIVEFOLD_")):
        if name not in known:
            offered = [v.name for v in READ if not v.meaning.startswith("for tests")]
            raise UsageError(f"unknown environment variable {name}{suggest(name, offered)}")
        text, choices = environ[name], known[name].choices
        if name.endswith("_S"):
            read_seconds(name, float(known[name].default), environ)
        elif text and choices and text not in choices:
            raise UsageError(f"{name}={text} is not a choice{suggest(text, choices)}")
        elif text and (form := known[name].form) and not re.fullmatch(form, text):
            raise UsageError(f"{name} cannot be that: it is {known[name].meaning}")


def read_seconds(name: str, default: float, environ: Mapping[str, str] = os.environ) -> float:
    """The variable `name` as a positive number of seconds. Raises `UsageError` if it is none."""
    assert any(variable.name == name for variable in READ), f"{name} is missing in the table"
    text = environ.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"{name}={text}: expected a positive number of seconds, such as {default:g}"
        )
    return seconds
