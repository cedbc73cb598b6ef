"""What `fivefold run --explain` starts in the place of a rank: it tells what the rank got, and becomes it.

    python -m fivefold.launch.explain --log-dir DIR -- command...

Each rank writes its facts to a file in `DIR/placement`. Rank 0 waits for those of the others, writes the
report to its standard error and to `DIR/placement.json`, and then starts the command, as all others did at
once. Works under any launcher that Fivefold knows; between nodes, DIR has to be a folder that all share.
Ranks of agents use a folder of their node instead, FIVEFOLD_PLACEMENT, and the agents pass facts on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fivefold.cluster.node import this_node
from fivefold.errors import FivefoldError, UsageError
from fivefold.launch.environment import RankPlace, allocated_nodes, locate
from fivefold.launch.meet import meeting
from fivefold.launch.node_folders import REPORT
from fivefold.launch.placement import Placement, place, text_of_findings, text_of_placement
from fivefold.launch.rank_facts import RankFacts, gather, look, tell
from fivefold.launch.situation import Situation
from fivefold.launch.torch_facts import Probe, TorchFacts
from fivefold.writing import write_whole

__all__ = ["REPORT", "describe", "main", "save", "told_by_plan", "where_they_meet", "wrapped"]

_GATHER_S = 60.0


def wrapped(command: Sequence[str], log_dir: Path) -> list[str]:
    """The command that tells where it runs before it becomes `command`."""
    return [
        sys.executable,
        "-P",  # no file beside the script is taken for one of our modules
        "-m",
        "fivefold.launch.explain",
        "--log-dir",
        str(log_dir),
        "--",
        *command,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Tell, and become the command. Returns (2) only for a mistake."""
    parser = argparse.ArgumentParser(prog="fivefold.launch.explain")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    folder = Path(os.environ.pop("FIVEFOLD_PLACEMENT", options.log_dir))
    try:
        where = locate()
        if not os.environ.get("FIVEFOLD_RESTART"):  # ranks that start again are where they were
            _refuse_used(folder, where)
            _tell(where, folder)
        os.execvp(options.command[0], options.command)  # noqa: S606 - becoming the rank is the purpose
    except FivefoldError as problem:
        return _fail(str(problem))
    except OSError as problem:
        return _fail(f"cannot start {options.command[0]}: {problem.strerror}")


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return UsageError.exit_code


def _refuse_used(folder: Path, where: RankPlace) -> None:
    if where.rank == 0 and (folder / REPORT).exists():
        raise UsageError(f"{folder} holds the {REPORT} of another run; choose another --log-dir")


def _tell(where: RankPlace, log_dir: Path) -> None:
    try:
        facts, folder = look(where), log_dir / "placement"
        if where.rank == 0:
            _report(where, facts, folder)
        else:
            tell(folder, facts)
    except Exception as problem:  # noqa: BLE001 - a report that fails must not keep the run from starting
        sys.stderr.write(f"warning: rank {where.rank} cannot tell where it runs: {problem}\n")


def _report(where: RankPlace, facts: RankFacts, folder: Path) -> None:
    with Probe() as probe:
        tell(folder, facts)
        ranks = gather(folder, where.world_size, _GATHER_S)
        report = place(_situation(where, ranks, probe.answer()))
    save(report, folder.parent / REPORT)
    sys.stderr.write(describe(report))
    sys.stderr.flush()


def _situation(where: RankPlace, ranks: tuple[RankFacts, ...], torch: TorchFacts) -> Situation:
    hosts = len({one.host for one in ranks})
    engine = os.environ.get("FIVEFOLD_ENGINE") or where.launcher
    backend, workers = told_by_plan(os.environ)
    return Situation(
        node=this_node(),
        ranks=ranks,
        world_size=where.world_size,
        nodes=max(hosts, 1 if where.local_size == where.world_size else allocated_nodes()),
        engine=engine,
        observed=True,
        torch=torch,
        backend=backend,
        workers=workers,
        meeting=where_they_meet(where, os.environ),
        environ=dict(os.environ),
    )


def told_by_plan(environ: Mapping[str, str]) -> tuple[str, int]:
    """Backend and loader workers of the plan that FIVEFOLD_PLAN names, else the defaults."""
    from fivefold.plan import Plan

    path = environ.get("FIVEFOLD_PLAN")
    plan = Plan.load(path) if path else Plan()
    return plan.comm.backend, plan.loader.workers


def where_they_meet(where: RankPlace, environ: Mapping[str, str]) -> str:
    """Where ranks find each other, in words or as address:port."""
    try:
        found = meeting(where, environ)
    except FivefoldError as problem:
        return f"unknown: {problem}"
    if found.kind == "env":
        return f"{found.address}:{found.port}"
    words = {
        "alone": "",
        "file": f"the file {found.path}",
        "mpi": "rank 0 tells its address by MPI",
    }
    return words[found.kind]


def describe(report: Placement) -> str:
    """Report and warnings as text."""
    return "".join(
        f"{line}\n" for line in [*text_of_placement(report), *text_of_findings(report.findings)]
    )


def save(report: Placement, path: Path) -> None:
    """Write the report; the file appears whole or not at all. Raises `UsageError`."""
    write_whole(path, json.dumps(asdict(report), indent=1) + "\n", "the report")


if __name__ == "__main__":
    sys.exit(main())
