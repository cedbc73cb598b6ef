"""`fivefold doctor`: this node, before a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from fivefold.errors import UsageError
from fivefold.launch.environment import allocated_nodes, launched, locate
from fivefold.launch.expectation import expectation, own_share
from fivefold.launch.explain import describe
from fivefold.launch.node_text import text_of_node
from fivefold.launch.placement import place
from fivefold.launch.torch_facts import LIMIT_S, Probe

__all__ = ["Doctor"]


@dataclass(frozen=True)
class Doctor:
    """Look at this node before a run: what it has, what was granted, and how ranks would be placed on it.

    Then come warnings about what makes a run slow, or makes it fail, each with a remedy. Nothing is
    changed. PyTorch is asked in a process of its own, so that a broken one is found and no more. Under
    srun or mpirun, rank 0 reports on itself, and the others are silent.

    Example: fivefold doctor -n 4
    """

    processes: Annotated[
        int | None, tyro.conf.arg(aliases=["-n", "-np"], metavar="N", help_behavior_hint="")
    ] = None
    """ranks that are to run here; default: as many as the layout of the plan needs, or 1"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """plan of the run: its layout, loader workers and backend count"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """print the report as JSON"""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """exit with code 1 if there are warnings"""
    torch_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = LIMIT_S
    """how long PyTorch may take to answer"""

    def run(self) -> int:
        """Look, and report."""
        if self.processes is not None and self.processes < 1:
            raise UsageError(f"-n {self.processes}: at least 1 rank is needed")
        if not 0 < self.torch_limit < float("inf"):
            raise UsageError(f"--torch-limit {self.torch_limit:g}: expected seconds above 0")
        processes, environ = self._asked(os.environ)
        if launched(environ) and locate(environ).rank > 0:
            return 0
        with Probe(environ, self.torch_limit) as probe:
            torch = probe.answer()
        if launched(environ):
            job = own_share(environ, torch)
        else:
            job = expectation(processes, "local", environ, torch)
            job = replace(job, nodes=allocated_nodes(environ))
        report = place(job)
        if self.json:
            print(json.dumps(asdict(report), indent=1))
        else:
            sys.stdout.write("".join(f"{line}\n" for line in text_of_node(report.node)))
            sys.stdout.write(describe(report))
        return 1 if self.strict and report.findings else 0

    def _asked(self, environ: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        """Ranks, and the environment that names the plan. Raises `PlanError` for a plan that cannot be."""
        path = self.plan or environ.get("FIVEFOLD_PLAN")
        if not path:
            return self.processes or 1, dict(environ)
        from fivefold.plan import Plan

        layout = Plan.load(path).layout
        return self.processes or layout.size, {**environ, "FIVEFOLD_PLAN": str(path)}
