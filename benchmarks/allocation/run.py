"""Starting a job on an allocation, and starting again after a loss: Fivefold, torchrun and mpirun by turns.

    PYTHONPATH=tests python benchmarks/allocation/run.py [--parts start,restart] [--rounds 7]

Nodes are namespaces of this machine. Every figure is the time that whoever waits sees: from the command to
the last rank's end of `start()`; from the kill to the end of the first step that is new.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
# Whoever installs Fivefold has its modules compiled, as torch's are; those of a checkout are if Python may.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from contender import leave_properly
from figures import environment, middle_half, ratio, table
from losses import (
    KINDS,
    NotRecovered,
    goodputs,
    recovered,
    section_of_goodput,
    section_of_parts,
    way_of_nvidia,
)
from publishing import Page, conditions, kept
from rounds import order, undisturbed
from shared import counted, modelled, section_of_counts, section_of_model
from ways import BESIDE, LIMIT_S, Way, awaited, fivefold, mpirun, running, torchrun

from login_site import Site

HERE = Path(__file__).resolve().parent
CASES = {"1x2": (1, 2), "2x1": (2, 1), "4x8": (4, 8)}
"""by name: nodes, and ranks on each"""


START = (
    Way("fivefold run", True, fivefold()),
    Way("fivefold run --fork", True, fivefold("--fork")),
    Way("torchrun", False, torchrun()),
    Way("mpirun (Open MPI)", False, mpirun),
)


def start_s(way: Way, site: Site, nodes: int, ranks: int) -> float:
    """Seconds from the command to the last rank's end of starting."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "started.py"), "ours" if way.ours else "torch", name]
        began = time.time()
        with running(way.commands(site, nodes, ranks, words, folder), site, folder) as started:
            awaited(lambda: len([*folder.glob("*.started")]) == nodes * ranks, folder)
            started.wait()
            return max(float(path.read_text()) for path in folder.glob("*.started")) - began


def _import_s(_: Way, site: Site) -> float:
    """To the moment at which it is there: what takes torch apart again comes after a start."""
    words = [sys.executable, "-c", "import torch, time; print(time.time())"]
    began = time.time()
    done = subprocess.run(words, env=site.environ, check=True, capture_output=True, text=True)
    return float(done.stdout) - began


_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
"""a remote shell that goes nowhere"""
_RANK = """#!/bin/sh
here=$1 all=$2
date +%s.%N >> $here/up-${FIVEFOLD_RESTART:-0}
ready() { [ "$(wc -l < $here/up-${FIVEFOLD_RESTART:-0})" -ge $all ]; }
if [ -n "$FIVEFOLD_RESTART" ]; then
    until ready; do sleep 1; done
elif [ "$RANK" = 0 ]; then
    until ready; do sleep 0.2; done
    date +%s.%N > $here/killed
    kill -9 $$
fi
[ -n "$FIVEFOLD_RESTART" ] || sleep 1000
"""
"""a rank without Python: tells that it is there, and the first is killed when all are"""
AGENTS, EACH = 128, 8


def _agents(rounds: int) -> dict[str, Any]:
    """Many agents, all on this machine: until all ranks are up, and up again after one was killed."""
    before = environment()
    seconds: dict[str, list[float]] = {"all ranks are up": [], "all are up again": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
            folder = Path(name)
            for file, text in (("shell", _SHELL), ("rank", _RANK)):
                (folder / file).write_text(text)
                (folder / file).chmod(0o755)
            hosts = ",".join(f"node{number}:{EACH}" for number in range(AGENTS))
            words = [
                str(BESIDE / "fivefold"),
                "run",
                "--engine",
                "ssh",
                "-H",
                hosts,
                "--restarts",
                "1",
            ]
            began = time.time()
            subprocess.run(
                [*words, str(folder / "rank"), name, str(AGENTS * EACH)],
                cwd=folder, env={**os.environ, "FIVEFOLD_RSH": str(folder / "shell")},
                stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=2 * LIMIT_S,
            )  # fmt: skip
            up, again = (
                max(map(float, (folder / f"up-{start}").read_text().split())) for start in (0, 1)
            )
            killed = float((folder / "killed").read_text())
            for what, took in zip(seconds, (up - began, again - killed), strict=True):
                seconds[what].append(round(took, 2))
    told = {
        "disturbed_rounds": 0
    }  # agents leave their parents: their use looks like that of others
    return {
        "benchmark": "agents", "rounds": rounds,
        "environment": {**before, "torch": _torch(), **told}, "seconds": seconds,
    }  # fmt: skip


def measured(part: str, rounds: int, nvidia: Path | None = None) -> dict[str, Any]:
    """Measure one part, a key of `TITLES`; `nvidia`: where nvidia-resiliency-ext is installed."""
    alone: dict[str, Callable[[], dict[str, Any]]] = {
        "goodput": lambda: goodputs(_torch()),
        "agents": lambda: _agents(rounds),
        "shared-files": counted,
        "model": lambda: modelled(kept(HERE / "results")["shared-files"]),
    }
    return alone[part]() if part in alone else _timed(part, rounds, _ways(part, nvidia))


def _ways(part: str, nvidia: Path | None) -> tuple[Way, ...]:
    if part not in KINDS:
        return START
    kind = KINDS[part]
    return kind.ways if nvidia is None else (*kind.ways, way_of_nvidia(kind, nvidia))


def _timed(part: str, rounds: int, ways: tuple[Way, ...]) -> dict[str, Any]:
    """Starts, or recoveries from a loss, by turns."""
    kind, _, case = part.partition("-")
    bound = Way("bound: python -c 'import torch'", False, mpirun)
    before = environment()
    failed: dict[str, int] = {}
    parts: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name, _site(name) as site:

        def ask(way: Way) -> float:
            if way is bound:
                return _import_s(way, site)
            if kind == "start":
                return start_s(way, site, *CASES[case])
            try:
                took = recovered(KINDS[part], way, site)
            except NotRecovered as problem:
                print(f"{way.name}: {problem}", flush=True)
                failed[way.name] = failed.get(way.name, 0) + 1
                return KINDS[part].limit_s
            if way.ours:
                parts.setdefault(way.name, []).append(took)
            return sum(took)

        named = {way.name: way for way in (bound, *ways)}
        if kind != "start" and KINDS[part].nodes > 1:
            told = {"disturbed_rounds": 0.0}  # what a lost node has used looks like use by others
            seconds: dict[str, list[float]] = {name: [] for name in named}
            for number in range(rounds):
                for way in order(list(named), number):
                    seconds[way].append(ask(named[way]))
        else:
            for way in named.values():  # files come into memory
                ask(way)
            seconds, others = undisturbed(
                named,
                rounds,
                ask,
                lambda done, _: f"{part}: round {done} of {rounds}",
                _ended_children_s,
            )
            told = others.told()
    return {
        "benchmark": part,
        "rounds": rounds,
        "environment": {**before, "torch": _torch(), **told},
        "failed": failed,
        "parts": {way: [[round(s, 3) for s in one] for one in told] for way, told in parts.items()},
        "seconds": {way: [round(s, 3) for s in told] for way, told in seconds.items()},
    }


def _torch() -> str:
    words = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def _site(folder: str) -> Generator[Site]:
    with Site(4, Path(folder)) as site:
        yield site


def _ended_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


TITLES = {
    "start-1x2": "Start-up: two ranks on one node",
    "start-2x1": "Start-up: two nodes with a rank each",
    "start-4x8": "Start-up: four nodes with eight ranks each",
    **{part: kind.title for part, kind in KINDS.items()},
    "goodput": "Four nodes with a rank each, killed at random",
    "agents": f"{AGENTS} agents with {EACH} ranks each",
    "shared-files": "Operations on shared files",
    "model": "2,048 ranks on 256 nodes, modelled",
}


def section(result: dict[str, Any]) -> str:
    """Its table, for the README."""
    for part, told in (("shared-files", section_of_counts), ("model", section_of_model)):
        if result["benchmark"] == part:
            return told(result, TITLES[part], conditions(result))
    if result["benchmark"] == "goodput":
        return section_of_goodput(result, TITLES["goodput"])
    if result["benchmark"] == "agents":
        rows = [
            (what, f"{sorted(told)[len(told) // 2]:.1f}", middle_half(told, 1))
            for what, told in result["seconds"].items()
        ]
        header = ("", "seconds, median", "middle half")
        about = (
            "Agents in Python, ranks of a shell script; all on this machine, called over a shell."
        )
        return f"### {TITLES['agents']}\n\n{table(header, rows)}\n\n{about} {conditions(result)}"
    seconds = result["seconds"]
    theirs = next(told for way, told in seconds.items() if way.startswith("torchrun"))
    rows = [
        (
            way,
            f"{sorted(told)[len(told) // 2]:.2f}",
            middle_half(told, 2),
            str(ratio(told, theirs)),
        )
        for way, told in seconds.items()
    ]
    header = ("", "seconds, median", "middle half", "of torchrun")
    failed = [f"{way} {count}" for way, count in result.get("failed", {}).items()]
    told = (
        f" Not there within {KINDS[result['benchmark']].limit_s:.0f} s, which counts: {', '.join(failed)}."
        if failed
        else ""
    )
    title = TITLES[result["benchmark"]]
    parts = f"{section_of_parts(result['parts'])}\n\n" if result.get("parts") else ""
    return f"### {title}\n\n{table(header, rows)}\n\n{parts}{conditions(result)}{told}"


PAGE = Page(HERE, section, tuple(TITLES))


def main() -> int:
    """Measure the parts that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(TITLES), help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--nvidia-resiliency", type=Path, metavar="DIR", help="where it is installed"
    )
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if strange := [part for part in parts if part not in TITLES]:
        parser.error(f"there is no part {strange[0]}; valid: {', '.join(TITLES)}")
    if shutil.which("nsenter") is None:
        parser.error("nodes are made by nsenter and unshare, which are not here")
    with leave_properly():
        nvidia = asked.nvidia_resiliency
        return PAGE.publish(parts, lambda part: measured(part, asked.rounds, nvidia), asked.results)


if __name__ == "__main__":
    sys.exit(main())
