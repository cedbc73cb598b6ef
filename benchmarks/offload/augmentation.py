"""Rounds of all contenders that train with the same batches, made on one core or on two."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contender import BenchmarkError, Contender, Kind
from figures import environment
from places import HELPERS, HERE, TRAINERS, Share, surroundings
from rounds import undisturbed
from workload import WORKS, Work, make_photos

TITLES = {
    "none": "no helper, ff.loader in the trainer",
    "torch": "DataLoader(num_workers=1), its worker on core 1",
    "local": "fivefold, helper on core 1, same node",
    "remote": "fivefold, helper on core 1, another node, 10 Gbit/s",
}
"""of those that train; the same as `worker.py` knows them by"""
PAIR_TITLES = {
    "pair": "two trainers on nodes of their own, no helper",
    "two": "the same, a helper for each",
    "shared": "the same, one helper for both",
}
"""of two trainers that share core 0, whose helpers share core 1"""
PAIR = "two"
"""the part of those"""
PAIR_WORK = "jpeg-32"
RATES = ("train", "augment", "train-at-once", "augment-at-once")
"""halves of the work, each alone and both at once"""
SETTLED_S = 20.0
"""the longest that helpers may go on after a block, until their queues are full"""


@dataclass
class Blocks:
    """What contenders said, by round."""

    ask: Mapping[str, Contender]
    milliseconds: int

    def one(self, name: str) -> dict[str, Any]:
        """A block of one contender, and what all its processes used."""
        contender = self.ask[name]
        before = contender.used_s()
        answers = contender.ask(self.milliseconds)
        cpu_s = contender.used_s() - before
        settle(contender)
        return {**together(answers), "cpu_s": cpu_s}

    def at_once(self) -> dict[str, dict[str, Any]]:
        """Both halves of the work at the same time, each on its core."""
        found: dict[str, dict[str, Any]] = {}

        def run(name: str) -> None:
            found[name] = self.ask[name].ask(self.milliseconds)[0]

        threads = [threading.Thread(target=run, args=(name,)) for name in ("train", "augment")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) < 2:
            raise BenchmarkError("training or augmentation alone ended")
        return found


def together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What trainers did at the same time: all samples, in the mean of their times."""
    mean = {key: statistics.fmean(a[key] for a in answers) for key in ("wall_s", "load_s")}
    each = [answer["samples"] for answer in answers]
    every = sum(answer["all_samples"] for answer in answers)
    return {**mean, "samples": sum(each), "each": each, "all_samples": every}


def settle(contender: Contender) -> None:
    """Wait until helpers and workers have filled their queues and compute no more."""
    end = time.monotonic() + SETTLED_S
    before = contender.used_s()
    while time.monotonic() < end:
        time.sleep(0.2)
        now = contender.used_s()
        if now - before < 0.02:
            return
        before = now


def kinds(group: Path, helpers: int) -> dict[str, Kind]:
    """How each contender is started."""
    places, placed = str(HERE / "places.py"), str(HERE / "placed.py")
    with_helper = ("--helpers", str(helpers), "--group", str(group))
    launchers: dict[str, tuple[str, ...]] = {
        "none": (placed, str(TRAINERS)),
        "torch": (placed, str(TRAINERS)),
        "local": (places, *with_helper, "local"),
        "remote": (places, *with_helper, "remote"),
        "train": (placed, str(TRAINERS)),
        "augment": (placed, str(HELPERS), "--group", str(group)),
    }
    for name in PAIR_TITLES:
        launchers[name] = (places, "--group", str(group), name)
    titles = {**TITLES, **PAIR_TITLES}
    return {
        name: Kind(name, titles.get(name, name), launcher, 2 if name in PAIR_TITLES else 1, 1)
        for name, launcher in launchers.items()
    }


def measured(asked: argparse.Namespace, name: str) -> dict[str, Any]:
    """A part: rounds at each share of a core."""
    work = WORKS[PAIR_WORK if name == PAIR else name]
    quotas = asked.quotas or ((100,) if name == PAIR else work.quotas)
    before = environment()
    with surroundings("photos") as (folder, share, stack):
        make_photos(folder / "photos", asked.photos)
        share.limit(100)
        running = started(asked, name, folder, share.path, stack)
        blocks = Blocks(running, round(1000 * asked.seconds))
        found = {str(quota): at_quota(asked, blocks, share, quota) for quota in quotas}
        greeting = running["train"].greeting
    told = found[str(quotas[0])]["told"]
    return {
        "part": name, "work": described(work), "rounds": asked.rounds, "block_s": asked.seconds,
        "environment": {**before, "torch": greeting["torch"], **told}, "quotas": found,
    }  # fmt: skip


def started(
    asked: argparse.Namespace, name: str, folder: Path, group: Path, stack: contextlib.ExitStack
) -> dict[str, Contender]:
    """All contenders, waiting; started one after the other."""
    work = PAIR_WORK if name == PAIR else name
    told = ["--work", work, "--photos", str(folder / "photos"), "--group", str(group)]
    known = kinds(group, 1)
    chosen = ("none", *PAIR_TITLES) if name == PAIR else asked.contenders
    running: dict[str, Contender] = {}
    for one in (*chosen, "train", "augment"):
        begun = time.monotonic()
        contender = Contender(known[one], HERE / "worker.py", told, folder)
        running[one] = stack.enter_context(contender)
        contender.wait_until_ready()
        settle(contender)
        print(f"{one} is ready after {time.monotonic() - begun:.0f} s", flush=True)
    return running


def at_quota(asked: argparse.Namespace, blocks: Blocks, share: Share, quota: int) -> dict[str, Any]:
    """Rounds in which all take turns."""
    share.limit(quota)
    ways = [*blocks.ask, "at-once"]

    def ask(name: str) -> dict[str, Any]:
        return blocks.at_once() if name == "at-once" else blocks.one(name)

    def told(done: int, answers: Mapping[str, Sequence[Any]]) -> str:
        last = {name: found[-1] for name, found in answers.items() if name != "at-once"}
        each = "  ".join(f"{n} {a['samples'] / a['wall_s']:.0f}" for n, a in last.items())
        return f"{quota} %, round {done}, samples/s: {each}"

    def own_s() -> float:
        return sum(contender.used_s() for contender in blocks.ask.values())

    answers, others = undisturbed({w: w for w in ways}, asked.rounds, ask, told, own_s)
    return {"blocks": answers, "told": others.told()}


def described(work: Work) -> dict[str, Any]:
    """For the result."""
    return {"title": work.title, "batch": work.batch, "pixels": work.pixels, "bf16": work.bf16}
