"""The same stream of batches, whatever becomes of helpers: killed, stopped for a while, started again.

Every run is one epoch of `streaming.py` with so many helpers, on this node or on others, which are killed or
stopped at random. Its hash has to be that of a run without helpers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import environment
from places import HERE, PORT, helper_environ, trainer_environ

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

LIMIT_S = 60.0
"""of a run"""
PACE_S = 0.02
WAYS = tuple((where, count) for where in ("local", "remote") for count in (1, 2, 4))


class Place:
    """Starts processes on one node, or helpers and trainer on nodes of their own."""

    def __init__(self, stack: contextlib.ExitStack, *, apart: bool, helpers: int) -> None:
        from nodes import Nodes
        from template import Template

        self.apart = apart
        self.folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-stream-"))
        )
        self.template = stack.enter_context(Template())
        self.nodes = (
            stack.enter_context(Nodes(1 + helpers, 64 << 20, template=self.template))
            if apart
            else None
        )
        self._logs = 0

    def address(self, number: int) -> str:
        """Where a helper listens."""
        if self.nodes is not None:
            return f"{self.nodes.address(1 + number)}:{PORT}"
        return f"unix:{self.folder}/helper-{number}.sock"

    def out(self, run: int) -> Path:
        """Where the trainer of a run writes to: seen from here and by it."""
        return (self.nodes.shared if self.nodes is not None else self.folder) / f"run-{run}.json"

    def start(self, node: int, words: Sequence[str], environ: dict[str, str]) -> Any:
        """A process; node 0 is the trainer's."""
        from template import Order

        if self.nodes is not None:
            return self.nodes.start(node, [sys.executable, *words], environ)
        self._logs += 1
        log = self.folder / f"{self._logs}.log"
        log.touch()
        order = Order(words, {**os.environ, **environ}, str(self.folder), str(log), None)
        return Local(self.template.start(order), log)


class Local:
    """A forked process, as `nodes.Process` would show it."""

    def __init__(self, forked: Any, log: Path) -> None:
        self._forked, self.log = forked, log

    @property
    def code(self) -> int | None:
        """How it ended."""
        return self._forked.poll()

    @property
    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def send_signal(self, signum: int) -> None:
        """To the process."""
        os.kill(self._forked.pid, signum)


class Crew:
    """The helpers of a run; those that are killed may be started again."""

    def __init__(self, place: Place, count: int, words: Sequence[str]) -> None:
        self._place, self._words = place, words
        self.key = secrets.token_hex(32)
        self.addresses = [place.address(number) for number in range(count)]
        self.processes = [self.start(number) for number in range(count)]

    def start(self, number: int) -> Any:
        """One of them."""
        address = self.addresses[number]
        environ = helper_environ(self.addresses, self.key, number, address)
        return self._place.start(1 + number, self._words, environ)

    def end(self) -> None:
        """All of them."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.code is None:
                    process.send_signal(signal.SIGKILL)
        until(lambda: all(process.code is not None for process in self.processes), 5.0)


def disturb(crew: Crew, draw: random.Random, running: Callable[[], bool]) -> list[str]:
    """Kill, stop and start helpers at random while the trainer runs; what was done."""
    done: list[str] = []
    while running():
        time.sleep(draw.uniform(0.02, 0.4))
        number = draw.randrange(len(crew.processes))
        process = crew.processes[number]
        with contextlib.suppress(ProcessLookupError):
            if process.code is not None:
                crew.processes[number] = crew.start(number)
                done.append("start")
            elif draw.random() < 0.5:
                process.send_signal(signal.SIGKILL)
                done.append("kill")
            else:
                process.send_signal(signal.SIGSTOP)
                done.append("stall")
                time.sleep(draw.uniform(0.1, 1.0))
                process.send_signal(signal.SIGCONT)
    return done


def one(
    place: Place, run: int, helpers: int, batches: int, *, faults: int | None
) -> dict[str, Any]:
    """A run; `faults` is the seed of what is done to helpers, None: nothing."""
    out = place.out(run)
    words = [
        str(HERE / "streaming.py"), str(out), "--batches", str(batches), "--pace", str(PACE_S),
    ]  # fmt: skip
    crew = Crew(place, helpers, words)
    environ = trainer_environ(crew.addresses, crew.key)
    trainer = place.start(0, words, environ)
    end = time.monotonic() + LIMIT_S
    done: list[str] = []
    failed = {"hash": None, "longest_s": LIMIT_S, "by_helpers": 0}
    try:
        until(lambda: out.with_suffix(".began").exists() or trainer.code is not None, LIMIT_S)
        if faults is not None and helpers:
            draw = random.Random(faults)
            done = disturb(crew, draw, lambda: trainer.code is None and time.monotonic() < end)
        until(lambda: trainer.code is not None, end - time.monotonic())
        told = json.loads(out.read_text()) if out.exists() else failed
        if told["hash"] is None:
            print(trainer.text[-2000:], flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            if trainer.code is None:
                trainer.send_signal(signal.SIGKILL)
        crew.end()
    return {**told, "done": {what: done.count(what) for what in ("kill", "stall", "start")}}


def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for something, for so long at most."""
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """All ways: runs without faults, and `asked.runs` with faults shared out among them."""
    import torch

    before = environment()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        alone = one(Place(stack, apart=False, helpers=0), 0, 0, asked.batches, faults=None)
    print(f"without helpers: {alone['hash']}", flush=True)
    share, rest = divmod(asked.runs, len(WAYS))
    for at, (where, count) in enumerate(WAYS):
        with contextlib.ExitStack() as stack:
            place = Place(stack, apart=where == "remote", helpers=count)
            quiet = [one(place, 0, count, asked.batches, faults=None)]
            faulty = [
                one(place, run, count, asked.batches, faults=1000 * at + run)
                for run in range(1, 1 + share + (at < rest))
            ]
        rows.append(summed(where, count, quiet, faulty, alone["hash"]))
        print(rows[-1], flush=True)
    return {
        "part": "stream", "batches": asked.batches, "hash": alone["hash"], "runs": asked.runs,
        "rows": rows, "environment": {**before, "torch": torch.__version__},
    }  # fmt: skip


def summed(
    where: str, count: int, quiet: list[dict[str, Any]], faulty: list[dict[str, Any]], right: str
) -> dict[str, Any]:
    """What runs of one way came to."""
    return {
        "where": where, "helpers": count, "quiet_same": quiet[0]["hash"] == right,
        "quiet_longest_s": quiet[0]["longest_s"], "runs": len(faulty),
        "same": sum(run["hash"] == right for run in faulty),
        "longest_s": sorted(run["longest_s"] for run in faulty),
        "by_helpers": sum(run["by_helpers"] for run in (*quiet, *faulty)),
        "done": {
            what: sum(run["done"][what] for run in faulty) for what in ("kill", "stall", "start")
        },
    }  # fmt: skip
