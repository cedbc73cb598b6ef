"""Faults, and what a report has to say of each after ten steps: rank and cause. For tests and a benchmark."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults import Gate, Quota, notes, paused, quota_refusal, run, slow_link
from fivefold.introspect.document import document
from fivefold.introspect.run import TracedRun
from namespaces import Job
from nodes import Nodes, refusal
from template import Template

__all__ = ["CASES", "CONTROL", "Case", "Verdict"]

_LIMIT_S = 120.0
_STEPS = 12
"""two to warm up, ten with the fault"""


@dataclass(frozen=True)
class Verdict:
    """What a report said."""

    text: str
    findings: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    inject: Callable[[Nodes, Path, Path], Job]
    """runs the job in nodes with (trace, working folder), breaks it, and returns when it has ended"""
    says: tuple[str, ...]
    """what the verdict has to name"""
    silent_on: tuple[str, ...] = ()
    """what it must not say"""
    nodes: int = 1
    needs: Callable[[], str] = lambda: ""
    """why this machine cannot do it, or nothing"""

    def right(self, text: str) -> bool:
        """Whether a verdict says what it has to, and nothing that it must not."""
        said = all(re.search(pattern, text) for pattern in self.says)
        return said and not any(re.search(pattern, text) for pattern in self.silent_on)

    def verdict(self, template: Template, folder: Path) -> Verdict:
        """Run it once, and read what the report says."""
        trace = folder / "trace"
        with Nodes(self.nodes, apart=self.nodes > 1, template=template) as nodes:
            job = self.inject(nodes, trace, folder)
            job.end()
        told = document(TracedRun.load(trace))
        return Verdict(
            told["verdict"]["text"], tuple(f"{f['id']}: {f['title']}" for f in told["findings"])
        )


def _inside(*options: str) -> Callable[[Nodes, Path, Path], Job]:
    """A fault that the script makes itself."""

    def inject(nodes: Nodes, trace: Path, folder: Path) -> Job:
        job = run(nodes, trace, f"--steps={_STEPS}", "--on=1", *options, hang_s=20)
        job.succeed(_LIMIT_S)
        return job

    return inject


def _begun(
    nodes: Nodes, trace: Path, folder: Path, *options: str, ranks: int = 2
) -> tuple[Job, Gate]:
    gate = Gate(folder)
    job = run(
        nodes, trace, f"--steps={_STEPS}", f"--gate={folder}", *options, ranks=ranks, hang_s=20
    )
    return job, gate


def _quota(nodes: Nodes, trace: Path, folder: Path) -> Job:
    job, gate = _begun(nodes, trace, folder)
    with Quota() as quota:
        quota.hold(job.ranks[1].pid)
        gate.open("start", job)
        gate.reached("train", job)
        quota.limit(0.2)
        gate.open("train", job)
        job.succeed(_LIMIT_S)
    return job


def _paused(nodes: Nodes, trace: Path, folder: Path) -> Job:
    job, gate = _begun(nodes, trace, folder, "--width=96")  # steps of several stops
    gate.open("start", job)
    gate.reached("train", job)
    with paused(job.ranks[1].pid, on_s=0.02, off_s=0.06):
        gate.open("train", job)
        job.succeed(_LIMIT_S)
    return job


def _slow_link(nodes: Nodes, trace: Path, folder: Path) -> Job:
    job, gate = _begun(nodes, trace, folder, "--backend=gloo", "--width=96", ranks=1)
    gate.reached("start", job)
    slow_link(nodes, 2, 40)
    gate.open("start", job)
    gate.open("train", job)
    job.succeed(_LIMIT_S)
    return job


def _link_that_becomes_slow(nodes: Nodes, trace: Path, folder: Path) -> Job:
    job, gate = _begun(nodes, trace, folder, "--backend=gloo", "--width=96", ranks=1)
    gate.open("start", job)
    gate.reached("train", job)  # what links can do has been measured by then
    slow_link(nodes, 2, 5)  # on crowded cores the other links are slow too, at the start and later
    gate.open("train", job)
    job.succeed(_LIMIT_S)
    return job


def _stuck(nodes: Nodes, trace: Path, folder: Path) -> Job:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    options = ["--fault=read", "--on=1", f"--pipe={pipe}", f"--steps={_STEPS}"]
    job = run(nodes, trace, *options, hang_s=1.0)
    _noted(trace, job)
    return job


def _mismatch(nodes: Nodes, trace: Path, folder: Path) -> Job:
    options = ["--fault=other", "--on=1", "--backend=gloo", f"--steps={_STEPS}"]
    job = run(nodes, trace, *options, hang_s=1.0)
    _noted(trace, job)
    return job


def _noted(trace: Path, job: Job) -> None:
    end = time.monotonic() + _LIMIT_S
    while not notes(trace, "hang", "mismatch"):
        assert time.monotonic() < end, job.told()
        time.sleep(0.05)


def _no_shaping() -> str:
    return refusal() or ("" if shutil.which("tc") else "no tc here")


CASES = (
    Case("slow loader", _inside("--fault=loader", "--seconds=0.15"), (r"[Rr]ank 1\b", "load|data")),
    Case("throttled core", _quota, (r"[Rr]ank 1\b", "throttled"), needs=quota_refusal),
    Case("stopped in turn", _paused, (r"[Rr]ank 1\b", "stopped|held up")),
    Case(
        "sleep in a layer",
        _inside("--fault=layer", "--seconds=0.15"),
        (r"[Rr]ank 1\b", r"faulty_training\.py:\d+ forward"),
    ),
    Case(
        "sleep in backward",
        _inside("--fault=backward", "--seconds=0.15"),
        (r"[Rr]ank 1\b", "backward", r"faulty_training\.py:\d+ backward"),
    ),
    Case(
        "slow link",
        _slow_link,
        (r"rank 2\b|node2", "link"),
        nodes=3,
        needs=_no_shaping,
    ),
    Case(
        "link that becomes slow",
        _link_that_becomes_slow,
        (r"rank 2\b|node2", "link", "slow"),
        nodes=3,
        needs=_no_shaping,
    ),
    Case("stuck in a read", _stuck, (r"for rank 1\b", "load", "_read_late")),
    Case("mismatched collective", _mismatch, (r"rank 1\b", "all_reduce", "barrier")),
)

CONTROL = Case(
    "no fault", _inside("--fault=none"), (), silent_on=("arrives", "slow link", "failed")
)
"""a run that is well: nobody is blamed"""
