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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from contender import BenchmarkError, leave_properly
from figures import environment, middle_half, ratio, table
from publishing import Page, conditions
from rounds import undisturbed

import mpis
from login_site import Site

HERE = Path(__file__).resolve().parent
LIMIT_S = 150.0
RESTART_LIMIT_S = 15.0
BESIDE = Path(sys.executable).parent
CASES = {"1x2": (1, 2), "2x1": (2, 1), "4x8": (4, 8)}
"""by name: nodes, and ranks on each"""
STEPS, KILLED_AFTER = 400, 8


@dataclass(frozen=True)
class Way:
    """A way to start ranks: what is run where, for a site, nodes, ranks on each, and a script's words."""

    name: str
    ours: bool
    commands: Callable[[Site, int, int, Sequence[str], Path], list[list[str]]]


def _fivefold(*options: str) -> Callable[[Site, int, int, Sequence[str], Path], list[list[str]]]:
    def commands(
        site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
    ) -> list[list[str]]:
        program = [str(BESIDE / "fivefold"), "run", "--log-dir", str(folder / "logs"), *options]
        if nodes == 1:
            return [[*program, "-n", str(ranks), *words]]
        hosts = ",".join(f"{site.nodes.host(node)}:{ranks}" for node in range(nodes))
        return [[*site.entering(folder), *program, "-H", hosts, *words]]

    return commands


def _torchrun(
    site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
) -> list[list[str]]:
    program = [str(BESIDE / "torchrun"), f"--nproc-per-node={ranks}", "--max-restarts=3"]
    program.append("--monitor-interval=0.1")  # its default, 0.1 s, named
    if nodes == 1:
        return [[*program, "--standalone", *words]]
    meet = [f"--nnodes={nodes}", f"--master-addr={site.nodes.address(0)}", "--master-port=29400"]
    return [
        [*site.entering(folder), *site.nodes.entry(node), *program, *meet, f"--node-rank={node}", *words]
        for node in range(nodes)
    ]  # fmt: skip


def _mpirun(
    site: Site, nodes: int, ranks: int, words: Sequence[str], folder: Path
) -> list[list[str]]:
    meeting = "127.0.0.1" if nodes == 1 else site.nodes.address(0)
    variables = ["-x", "OMP_NUM_THREADS", "-x", "PATH"]
    command = [str(mpis.find("openmpi")), *mpis.options("openmpi"), *variables]
    command += ["-n", str(nodes * ranks)]
    before: list[str] = []
    if nodes > 1:
        hosts = ",".join(f"{site.nodes.host(node)}:{ranks}" for node in range(nodes))
        command += ["--host", hosts]
        before = site.entering(folder)
    given = ["env", f"MASTER_ADDR={meeting}", "MASTER_PORT=29400"]
    return [[*before, *command, *given, sys.executable, *words]]


START = (
    Way("fivefold run", True, _fivefold()),
    Way("fivefold run --fork", True, _fivefold("--fork")),
    Way("torchrun", False, _torchrun),
    Way("mpirun (Open MPI)", False, _mpirun),
)
RESTART = (
    Way("fivefold run --restarts 3", True, _fivefold("--restarts", "3")),
    Way("fivefold run --restarts 3 --fork", True, _fivefold("--restarts", "3", "--fork")),
    Way("torchrun, distributed checkpoint", False, _torchrun),
)


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], site: Site, folder: Path) -> Generator[None]:
    with (folder / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                command, cwd=folder, env=site.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        try:
            yield
            for process in processes:
                process.wait(LIMIT_S)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(LIMIT_S)


def _awaited(done: Callable[[], bool], folder: Path, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            last = (folder / "output").read_text(errors="replace").splitlines()[-20:]
            raise BenchmarkError("ranks did not get there; last lines:\n" + "\n".join(last))
        time.sleep(0.005)


def start_s(way: Way, site: Site, nodes: int, ranks: int) -> float:
    """Seconds from the command to the last rank's end of starting."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "started.py"), "ours" if way.ours else "torch", name]
        began = time.time()
        with _running(way.commands(site, nodes, ranks, words, folder), site, folder):
            _awaited(lambda: len([*folder.glob("*.started")]) == nodes * ranks, folder)
            return max(float(path.read_text()) for path in folder.glob("*.started")) - began


def restart_s(way: Way, site: Site) -> float:
    """Seconds from the kill of a rank to the end of the first step that no rank had ended before."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "recovered.py"), "ours" if way.ours else "torch", name, str(STEPS)]
        with _running(way.commands(site, 1, 2, words, folder), site, folder):
            _awaited(lambda: bool(_steps(folder)) and _steps(folder)[-1][0] >= KILLED_AFTER, folder)
            os.kill(_steps(folder)[-1][2], signal.SIGKILL)
            killed = time.time()
            known = _steps(folder)
            reached, victim = known[-1][0], known[-1][2]
            _awaited(
                lambda: any(s > reached and p != victim for s, _, p in _steps(folder)),
                folder,
                RESTART_LIMIT_S,
            )
            new = next(when for s, when, p in _steps(folder) if s > reached and p != victim)
            for one in _steps(folder)[-1:]:  # enough was seen
                os.kill(one[2], signal.SIGKILL)
            _end(folder)
            return new - killed


def _end(folder: Path) -> None:
    """The launcher and all that it started."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()


def _steps(folder: Path) -> list[tuple[int, float, int]]:
    """Steps that rank 1 has ended: number, time and process."""
    path = folder / "steps-1"
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split() for line in lines]
    return [
        (int(s), float(when), int(pid)) for s, when, pid in (one for one in split if len(one) == 3)
    ]


def _import_s(_: Way, site: Site) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=site.environ, check=True)
    return time.perf_counter() - began


def measured(part: str, rounds: int) -> dict[str, Any]:
    """Measure one part: start-1x2, start-2x1, start-4x8 or restart."""
    kind, _, case = part.partition("-")
    ways = START if kind == "start" else RESTART
    bound = Way("bound: python -c 'import torch'", False, _mpirun)
    before = environment()
    failed: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name, _site(name) as site:

        def ask(way: Way) -> float:
            if way is bound:
                return _import_s(way, site)
            if kind == "start":
                return start_s(way, site, *CASES[case])
            try:
                return restart_s(way, site)
            except BenchmarkError:
                failed[way.name] = failed.get(way.name, 0) + 1
                return RESTART_LIMIT_S

        named = {way.name: way for way in (bound, *ways)}
        for way in named.values():  # files come into memory
            ask(way)
        seconds, others = undisturbed(
            named,
            rounds,
            ask,
            lambda done, _: f"{part}: round {done} of {rounds}",
            _ended_children_s,
        )
    return {
        "benchmark": part,
        "rounds": rounds,
        "environment": {**before, "torch": _torch(), **others.told()},
        "failed": failed,
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
    "restart": "A rank of two is killed: to the end of the first new step",
}


def section(result: dict[str, Any]) -> str:
    """Its table, for the README."""
    seconds = result["seconds"]
    torchrun = next(told for way, told in seconds.items() if way.startswith("torchrun"))
    rows = [
        (
            way,
            f"{sorted(told)[len(told) // 2]:.2f}",
            middle_half(told, 2),
            str(ratio(told, torchrun)),
        )
        for way, told in seconds.items()
    ]
    header = ("", "seconds, median", "middle half", "of torchrun")
    failed = [f"{way} {count}" for way, count in result.get("failed", {}).items()]
    told = (
        f" Not there within {RESTART_LIMIT_S:.0f} s, which counts: {', '.join(failed)}."
        if failed
        else ""
    )
    title = TITLES[result["benchmark"]]
    return f"### {title}\n\n{table(header, rows)}\n\n{conditions(result)}{told}"


PAGE = Page(HERE, section, tuple(TITLES))


def main() -> int:
    """Measure the parts that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(TITLES), help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if strange := [part for part in parts if part not in TITLES]:
        parser.error(f"there is no part {strange[0]}; valid: {', '.join(TITLES)}")
    if shutil.which("nsenter") is None:
        parser.error("nodes are made by nsenter and unshare, which are not here")
    with leave_properly():
        return PAGE.publish(parts, lambda part: measured(part, asked.rounds), asked.results)


if __name__ == "__main__":
    sys.exit(main())
