"""`python -m fuzz`: random nets under random layouts, against one process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign, or one case again. 1 if anything is wrong, a traceback, a crash or a hang; else 0."""
    told = _parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["FUZZ_DEVICE"] = told.device
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    import torch

    torch.set_num_threads(1)
    if told.mutants:
        return _mutants(told)
    return _replayed(told) if told.replay else _campaign(told)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    add = parser.add_argument
    add(
        "--seed",
        type=int,
        default=0,
        help="of the campaign: case i has the seed SEED * 1000000 + i",
    )
    add("--cases", type=int, default=200, help="how many valid cases")
    add("--minutes", type=float, default=0.0, help="stop earlier, after so many minutes")
    add("--only", action="append", default=[], metavar="TAG", help="only cases with this tag")
    add("--layout", default=None, help="only this layout, such as data=2,pipe=2")
    add(
        "--device",
        default="cpu",
        help="where both sides compute: cpu, or cuda, which ranks then share",
    )
    add("--jobs", type=int, default=1, help="how many cases at once")
    add("--sweep", action="store_true", help="instead of random cases, every feature alone")
    add("--shrink", type=int, default=20, help="how many bad cases to make small")
    add(
        "--replay",
        metavar="FILE",
        help="run the case of a file, or of a seed, and tell all about it",
    )
    add(
        "--fault",
        default="",
        help="break something on purpose: a function of fuzz.faults, or module:function",
    )
    add(
        "--mutants",
        action="store_true",
        help="break parts of Fivefold in turn; how soon each is found",
    )
    add("--json", metavar="REPORT", help="write the report to a file")
    return parser


def _campaign(told: argparse.Namespace) -> int:
    from fuzz.campaign import Campaign, Wanted
    from fuzz.table import table

    layout = None
    if told.layout is not None:
        pairs = [pair.split("=") for pair in told.layout.split(",") if pair]
        layout = {axis: int(size) for axis, size in pairs}
    wanted = Wanted(
        seed=told.seed,
        cases=1_000_000 if told.sweep else told.cases,
        minutes=told.minutes,
        only=tuple(told.only),
        layout=layout,
        shrink=0 if told.sweep else told.shrink,
        jobs=told.jobs,
        sweep=told.sweep,
        fault=told.fault,
    )
    campaign = Campaign(wanted, tell=lambda line: print(line, flush=True))
    campaign.run()
    report = {"commit": _commit(), **campaign.report()}
    if told.json:
        Path(told.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 1 if campaign.bad else 0


def _commit() -> str:
    """What is tried: the commit, and whether files differ from it; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _mutants(told: argparse.Namespace) -> int:
    """How many cases it takes to find each seeded fault."""
    from fuzz import mutants
    from fuzz.campaign import Campaign, Wanted

    missed = 0
    for name in mutants.MUTANTS:
        fault = f"fuzz.mutants:{name}"
        wanted = Wanted(seed=told.seed, cases=told.cases, shrink=0, stop=True, fault=fault)
        campaign = Campaign(wanted, tell=lambda _line: None)
        campaign.run()
        tried, what = sum(campaign.outcomes.values()), getattr(mutants, name).__doc__
        found = campaign.bad[0]["outcome"].kind if campaign.bad else "not found"
        print(f"{name:24} {found:10} {tried:4} cases   {what}", flush=True)
        missed += not campaign.bad
    return 1 if missed else 0


def _replayed(told: argparse.Namespace) -> int:
    from fuzz.cases import label, random_case
    from fuzz.judge import Rejected
    from fuzz.runner import Runner

    file = Path(told.replay)
    case = json.loads(file.read_text()) if file.exists() else random_case(int(told.replay))
    case.pop("found", None)
    with Runner() as runner:
        try:
            outcome = runner.run(case, fault=told.fault)
        except Rejected as why:
            print(f"not valid in one process: {why}")
            return 1
    print(json.dumps(case, indent=1))
    print(f"{label(case)}: {outcome.kind}: {outcome.text}")
    for line in outcome.details:
        print(f"  {line}")
    return 1 if outcome.bad else 0


if __name__ == "__main__":
    sys.exit(main())
