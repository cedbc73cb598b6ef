"""Rounds of contenders that train and validate, and of the parts of it alone and at once."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from augmentation import settle
from contender import BenchmarkError, Contender, Kind
from epoch_work import WORKS, make_data
from figures import environment
from places import HELPERS, HERE, TRAINERS, surroundings
from rounds import undisturbed

TITLES = {
    "without": "no validation at all",
    "none": "no helper, validation in the trainer",
    "da": "helper makes batches (O-DA)",
    "mv": "helper evaluates (O-MV)",
    "hy": "helper does both (O-Hy)",
    "mv-remote": "helper on another node evaluates (O-MV)",
    "hy-remote": "helper on another node does both (O-Hy)",
}
PARTS = {
    "validation": ("without", "none", "mv", "mv-remote"),
    "hybrid": ("none", "da", "mv", "hy", "hy-remote"),
    "cifar10": ("none", "da", "mv", "hy"),
    "svhn": ("none", "da", "mv", "hy"),
    "tiny-imagenet": ("none", "da", "mv", "hy"),
}
PUBLISHED = ("cifar10", "svhn", "tiny-imagenet")
HALVES = ("train", "augment", "evaluate")
HALF_S = 1.0
"""of a part alone"""


def kinds(group: Path) -> dict[str, Kind]:
    """How each contender is started."""
    found: dict[str, Kind] = {}
    for name in (*TITLES, *HALVES):
        if name in ("without", "none", "train"):
            launcher = [str(HERE / "placed.py"), str(TRAINERS)]
        elif name in HALVES:
            launcher = [str(HERE / "placed.py"), str(HELPERS), "--group", str(group)]
        else:
            layout = "remote" if name.endswith("-remote") else "local"
            launcher = [str(HERE / "places.py"), "--group", str(group), layout]
        found[name] = Kind(name, TITLES.get(name, name), launcher, 1, 1)
    return found


def measured(asked: argparse.Namespace, part: str) -> dict[str, Any]:
    """A part: rounds of all its contenders."""
    work, before = WORKS[part], environment()
    with surroundings("data") as (folder, share, stack):
        make_data(work, folder / "data")
        running = started(part, folder, share.path, stack)
        answers, others = rounds(asked, running)
        greeting = running["train"].greeting
    alike = same_bits(answers)
    return {
        "part": part, "work": asdict(work),
        "rounds": asked.rounds, "epochs": asked.epochs, "same_bits": alike,
        "environment": {**before, "torch": greeting["torch"], **others.told()},
        "epoch_s": {
            name: [a["epoch_s"] for a in found] for name, found in answers.items() if name in TITLES
        },
        "halves": {name: found for name, found in answers.items() if name not in TITLES},
        "cpu_s": {
            name: [a["cpu_s"] for a in found] for name, found in answers.items() if name in TITLES
        },
    }  # fmt: skip


def started(
    part: str, folder: Path, group: Path, stack: contextlib.ExitStack
) -> dict[str, Contender]:
    """All contenders, waiting."""
    known, told = kinds(group), ["--work", part, "--data", str(folder / "data")]
    running: dict[str, Contender] = {}
    for name in (*PARTS[part], *HALVES):
        begun = time.monotonic()
        contender = Contender(known[name], HERE / "epoch_worker.py", told, folder)
        running[name] = stack.enter_context(contender)
        contender.wait_until_ready()
        settle(contender)
        print(f"{name} is ready after {time.monotonic() - begun:.0f} s", flush=True)
    return running


def rounds(
    asked: argparse.Namespace, running: Mapping[str, Contender]
) -> tuple[dict[str, list[Any]], Any]:
    """Epochs of each contender in turn; parts alone, and training beside each of the others."""
    halves = round(-1000 * asked.half)

    def ask(way: str) -> dict[str, Any]:
        if way.startswith("train+"):
            return at_once(running, ("train", way.removeprefix("train+")), halves)
        contender = running[way]
        before = contender.used_s()
        told = contender.ask(halves if way in HALVES else asked.epochs)[0]
        settle(contender)
        return {**told, "cpu_s": contender.used_s() - before}

    def told(done: int, answers: Mapping[str, Sequence[Any]]) -> str:
        last = {name: found[-1] for name, found in answers.items() if name in TITLES}
        return f"round {done}, s per epoch: " + "  ".join(
            f"{name} {answer['epoch_s']:.2f}" for name, answer in last.items()
        )

    ways = {w: w for w in (*running, "train+augment", "train+evaluate")}
    return undisturbed(
        ways, asked.rounds, ask, told, lambda: sum(c.used_s() for c in running.values())
    )


def at_once(
    running: Mapping[str, Contender], names: Sequence[str], number: int
) -> dict[str, float]:
    """Seconds per epoch of two parts at the same time, each on its core."""
    found: dict[str, float] = {}

    def run(name: str) -> None:
        found[name] = running[name].ask(number)[0]["epoch_s"]

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < len(names):
        raise BenchmarkError(f"{' or '.join(names)} alone ended")
    return found


def same_bits(answers: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Whether all contenders found the same figures in all epochs, and how many were compared."""
    found = {
        name: rounds[-1]["results"]
        for name, rounds in answers.items()
        if name in TITLES and name != "without"
    }
    epochs = sorted({epoch for results in found.values() for epoch in results}, key=int)
    differ = [
        epoch
        for epoch in epochs
        if len({str(results.get(epoch)) for results in found.values()}) > 1
    ]
    return {"contenders": list(found), "epochs": len(epochs), "differ": differ}
