"""What a loss costs: a rank, a node or a network that is gone, and many of them at random moments."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from contender import BenchmarkError
from figures import environment, table
from publishing import conditions
from ways import Way, awaited, fivefold, ft_launcher, running, torchrun

from login_site import Site

__all__ = [
    "KINDS",
    "Loss",
    "NotRecovered",
    "goodputs",
    "recovered",
    "section_of_goodput",
    "section_of_parts",
    "way_of_nvidia",
]

HERE = Path(__file__).resolve().parent
STEPS, KILLED_AFTER = 400, 60
GOODPUT_S, MEAN_S, OF_NODES = 600.0, 30.0, 0.2
"""of a run under random kills; between two of them; and which part of these are nodes"""
NODES_TOO = ", one in five of a node, which is back at once, its disk empty"
SEED = 3
"""draws twenty of them, three of nodes"""
PARTS = ("until the script runs", "meeting", "loading", "to the end of a new step")


@dataclass(frozen=True)
class Loss:
    """Something that is lost: on how many nodes, with how many ranks on each, and who stands by."""

    title: str
    nodes: int
    ranks: int
    limit_s: float
    """for getting to a new step; who does not get there counts as this"""
    cause: Callable[[Site, int], None]
    """what happens to the site, and to the process of rank 1"""
    ways: tuple[Way, ...]


def _ways(spares: int | None) -> tuple[Way, ...]:
    more = spares or 0
    return (
        Way("fivefold run --restarts 3", True, fivefold("--restarts", "3", spares=more)),
        Way(
            "fivefold run --restarts 3 --fork",
            True,
            fivefold("--restarts", "3", "--fork", spares=more),
        ),
        Way("torchrun, distributed checkpoint", False, torchrun("--max-restarts=3", spares=spares)),
    )


KINDS = {
    "restart": Loss(
        "A rank of two is killed: to the end of the first new step",
        1, 2, 15.0, lambda _, pid: os.kill(pid, signal.SIGKILL), _ways(None),
    ),
    "node": Loss(
        "A node of two dies, and a spare takes its place: to the end of the first new step",
        2, 1, 30.0, lambda site, _: site.nodes.kill(1), _ways(1),
    ),
    "cable": Loss(
        "The network of a node of two is dead, and a spare takes its place: to the end of the first new step",
        2, 1, 45.0, lambda site, _: site.nodes.cut(1), _ways(1),
    ),
}  # fmt: skip


def way_of_nvidia(kind: Loss, installed: Path) -> Way:
    """The launcher of nvidia-resiliency-ext, in the place of torchrun."""
    before = ft_launcher(installed)
    spares = 1 if kind.nodes > 1 else None
    name = "ft_launcher (nvidia-resiliency-ext), distributed checkpoint"
    return Way(name, False, torchrun("--max-restarts=3", spares=spares, words_before=before))


class NotRecovered(BenchmarkError):
    """No new step within the limit."""


def recovered(kind: Loss, way: Way, site: Site) -> tuple[float, ...]:
    """Seconds from a loss to the end of the first step that is new, by `PARTS` if it is ours.

    Raises `NotRecovered`; `BenchmarkError` if the run did not come to a loss.
    """
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "recovered.py"), "ours" if way.ours else "torch", name, str(STEPS)]
        try:
            with running(way.commands(site, kind.nodes, kind.ranks, words, folder), site, folder):
                awaited(
                    lambda: bool(_steps(folder)) and _steps(folder)[-1][0] >= KILLED_AFTER, folder
                )
                kind.cause(site, int(_steps(folder)[-1][2].partition("@")[0]))
                killed = time.time()
                reached, _, victim = _steps(folder)[-1]

                def new() -> list[float]:
                    return [w for s, w, who in _steps(folder) if s > reached and who != victim]

                try:
                    awaited(lambda: bool(new()), folder, kind.limit_s)
                except BenchmarkError as problem:
                    raise NotRecovered(str(problem)) from None
                times = [killed, *_parts(folder), new()[0]] if way.ours else [killed, new()[0]]
                _end(folder)
        finally:
            if kind.nodes > 1:
                _end(folder)
                site.nodes.replace(1)
                site.renew()
    return tuple(b - a for a, b in itertools.pairwise(times))


def _steps(folder: Path) -> list[tuple[int, float, str]]:
    """Steps that rank 1 has ended: number, time and process."""
    path = folder / "steps-1"
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split() for line in lines]
    return [(int(s), float(when), who) for s, when, who in (one for one in split if len(one) == 3)]


def _parts(folder: Path) -> list[float]:
    """When the last start of rank 1 came how far."""
    return [float(when) for when in (folder / "parts-1").read_text().splitlines()[-1].split()]


def goodput(way: Way, site: Site, seed: int) -> dict[str, Any]:
    """A run on four nodes and a spare, of which ranks are killed at random, and nodes, which come back.

    `useful` part of its time, `kills`, `nodes` among them, `step_s`, and `weights` by step.
    """
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "recovered.py"), "ours" if way.ours else "torch", name, str(100_000)]
        commands = way.commands(site, 4, 1, words, folder)
        with running(commands, site, folder) as started:
            awaited(lambda: len(_steps(folder)) > KILLED_AFTER, folder)
            began, kills, nodes, first = time.time(), 0, 0, _steps(folder)[-1][0]
            for after_s, of_node, which in _moments(seed):
                time.sleep(max(0.0, began + after_s - time.time()))
                if of_node:
                    nodes, node = nodes + 1, 1 + int(4 * which)
                    site.nodes.replace(node)
                    site.renew()
                    if not way.ours:  # who has started it there by hand does so again
                        started.start(way.commands(site, 4, 1, words, folder)[node])
                else:
                    kills += _kill_one(folder, which)
            time.sleep(max(0.0, began + GOODPUT_S - time.time()))
            ended = _steps(folder)
            _end(folder)
        times = [when for step, when, _ in ended if step > first and when <= began + GOODPUT_S]
        between = sorted(b - a for a, b in itertools.pairwise(times))
        step_s = between[len(between) // 2]
        done = max(step for step, when, _ in ended if when <= began + GOODPUT_S) - first
        return {
            "useful": done * step_s / GOODPUT_S, "kills": kills + nodes, "nodes": nodes,
            "step_s": step_s, "weights": _weights(folder),
        }  # fmt: skip


def _moments(seed: int) -> list[tuple[float, bool, float]]:
    """Of losses: seconds from the beginning, whether it is a node, and a number below 1 that says which."""
    draw, found, after_s = random.Random(seed), list[tuple[float, bool, float]](), 0.0
    while (after_s := after_s + draw.expovariate(1 / MEAN_S)) < GOODPUT_S:
        found.append((after_s, draw.random() < OF_NODES, draw.random()))
    return found


def _weights(folder: Path) -> dict[str, list[str]]:
    """By step: what was found, each once."""
    path, found = folder / "weights", dict[str, list[str]]()
    for line in path.read_text().splitlines() if path.exists() else []:
        step, _, told = line.partition(" ")
        found.setdefault(step, [])
        if told not in found[step]:
            found[step].append(told)
    return found


def _undisturbed(site: Site, last: int) -> dict[str, list[str]]:
    """The weights of a run that nobody disturbs, by step, to `last`."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        words = [str(HERE / "recovered.py"), "undisturbed", name, str(100_000)]
        with running(fivefold()(site, 4, 1, words, folder), site, folder):
            awaited(lambda: str(last) in _weights(folder), folder, 4 * GOODPUT_S)
            return _weights(folder)


def _kill_one(folder: Path, which: float) -> int:
    """A rank, that part of the way through all; 0 if none is there at this moment."""
    ranks: list[Any] = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or [""]
        starts = any("torchrun" in word or word == "run" for word in words)
        if str(folder) in words and "python" in words[0] and not starts:
            ranks.append(process)
    parents = {process.info["ppid"] for process in ranks}  # with --fork, what they are forked from
    ranks = sorted((one for one in ranks if one.pid not in parents), key=lambda one: one.pid)
    if not ranks:
        return 0
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks[int(which * len(ranks))].kill()
    return 1


def _end(folder: Path) -> None:
    """The launcher and all that it started."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()


GOODPUT = (
    Way("fivefold run --fork", True, fivefold("--restarts", "1000", "--fork", spares=1)),
    Way("torchrun, distributed checkpoint", False, torchrun("--max-restarts=1000", spares=1)),
)


def goodputs(torch: str) -> dict[str, Any]:
    """By turns, the same moments for all."""
    before = environment()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        for way in GOODPUT:
            with Site(5, Path(name)) as site:
                runs[way.name] = goodput(way, site, SEED)
        found = {way.name: runs[way.name].pop("weights") for way in GOODPUT}
        last = max(int(step) for told in found.values() for step in told)
        with Site(4, Path(name)) as site:  # the same sums, in the same order
            right = _undisturbed(site, last)
    for way in GOODPUT:
        differing = [step for step, told in found[way.name].items() if told != right[step]]
        runs[way.name]["compared"] = len(found[way.name])
        runs[way.name]["differing"] = len(differing)
    return {"benchmark": "goodput", "environment": {**before, "torch": torch}, "runs": runs}


def section_of_goodput(result: dict[str, Any], title: str) -> str:
    """Its table."""
    header = (
        "", "useful part of the time", "kills", "nodes among them", "a step, ms", "lost per kill, s",
        "weights compared", "different",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for way, run in result["runs"].items():
        lost_s = (1 - run["useful"]) * GOODPUT_S / max(run["kills"], 1)
        told = f"{run['useful']:.3f}", str(run["kills"]), str(run["nodes"])
        compared = (str(run["compared"]), str(run["differing"])) if run["compared"] else ("-", "-")
        rows.append((way, *told, f"{run['step_s'] * 1e3:.0f}", f"{lost_s:.2f}", *compared))
    of_nodes = any(run["nodes"] for run in result["runs"].values())
    about = (
        f"{GOODPUT_S:.0f} s each, one after the other; kills at random moments, {MEAN_S:.0f} s apart on "
        f"average{NODES_TOO if of_nodes else ', of ranks only, without a spare'}. Useful: steps that were "
        "done, each once, times the median of a step."
    )
    ours, theirs = (1 - run["useful"] for run in result["runs"].values())
    about += f" Time lost: {ours / theirs:.2f} of torchrun's."
    if any(run["compared"] for run in result["runs"].values()):
        about += (
            " Weights: every 25th step's of rank 0, as often as it was computed, against those of a run that "
            "nobody disturbed, bit by bit."
        )
    return f"### {title}\n\n{table(header, rows)}\n\n{about} {conditions(result)}"


def section_of_parts(parts: dict[str, list[list[float]]]) -> str:
    """Where the time of a recovery goes: medians of each part."""
    rows: list[tuple[str, ...]] = []
    for way, rounds in parts.items():
        medians = [statistics.median(told) for told in zip(*rounds, strict=True)]
        rows.append((way, *(f"{seconds:.2f}" for seconds in medians)))
    return table(("of which, s", *PARTS), rows)
