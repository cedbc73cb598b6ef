"""What a checkpoint costs a run: Fivefold beside torch's own ways and lm-resiliency, on nodes of their own.

    python benchmarks/checkpoint/run.py --lm-resiliency DIR

measures all parts in rounds in which the contenders take turns, prints the tables, keeps the results and
renews README.md. `--parts`, `--contenders` and `--rounds` choose less; fewer than 7 rounds are not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import psutil
import report
from contender import BenchmarkError, Contender
from contenders import HERE, TITLES, kinds, missing
from costs import of_blocks
from figures import environment
from rounds import take_turns

LEAST_FREE_BYTES = 1 << 30
"""of memory, when all contenders are there; what they keep they have by then"""


@dataclass(frozen=True)
class Part:
    """What is trained, and how it is divided."""

    nodes: int
    division: str
    model: str
    layers: int
    batch: int
    quiet: int
    """steps of a block without a save"""
    steps: int
    """of a block with one: long enough for what goes on beside training"""


PARTS = {
    "replicated": Part(2, "replicated", "mlp", 4, 64, 8, 12),
    "sharded": Part(4, "sharded", "mlp", 2, 32, 6, 10),
}


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--contenders", nargs="+", choices=TITLES, default=tuple(TITLES))
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each contender")
    parser.add_argument("--quiet", type=int, help="steps of a block without a save")
    parser.add_argument("--steps", type=int, help="steps of a block with one")
    parser.add_argument("--layers", type=int, help="of the net, 50 MB of state each")
    parser.add_argument("--throttle", type=float, default=200e6, help="of what is shared, bytes/s")
    parser.add_argument("--disk-mib", type=int, default=4096, help="of each node's disk")
    parser.add_argument("--lm-resiliency", type=Path, help="folder it was installed to")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    return report.PAGE.publish(asked.parts, lambda name: measured(asked, name), asked.results)


def measured(asked: argparse.Namespace, name: str) -> dict[str, Any]:
    """One part: rounds of two blocks per contender, without a save and with one."""
    part = PARTS[name]
    quiet, steps = asked.quiet or part.quiet, asked.steps or part.steps
    before = environment()
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running = started(asked, part, Path(folder), stack)

        def both(contender: Contender) -> dict[str, Any]:
            return {"quiet": block(contender, quiet), "saved": block(contender, -steps)}

        blocks, others = take_turns(running, asked.rounds, both, teller(before["cores"]))
        greeting = running[-1].greeting
    state_bytes = next(iter(blocks.values()))[0]["quiet"]["state_bytes"]
    return {
        "part": name, "nodes": part.nodes, "division": part.division, "model": part.model,
        "state_bytes": state_bytes, "throttle_bytes_per_s": asked.throttle,
        "rounds": asked.rounds, "quiet": quiet, "steps": steps,
        "environment": {**before, "torch": greeting["torch"], **others.told()},
        "absent": {
            n: problem for n in asked.contenders if (problem := missing(n, asked.lm_resiliency))
        },
        "blocks": blocks,
    }  # fmt: skip


def started(
    asked: argparse.Namespace, part: Part, folder: Path, stack: contextlib.ExitStack
) -> list[Contender]:
    """All contenders, waiting."""
    told = ["--model", part.model, "--layers", str(asked.layers or part.layers)]
    told += ["--batch", str(part.batch), "--division", part.division]
    known = kinds(part.nodes, asked.disk_mib, asked.throttle, asked.lm_resiliency)
    running: list[Contender] = []
    for name in asked.contenders:
        if problem := missing(name, asked.lm_resiliency):
            print(f"without {TITLES[name]}: {problem}", flush=True)
            continue
        begun = time.monotonic()
        contender = Contender(known[name], HERE / "worker.py", told, folder)
        running.append(stack.enter_context(contender))
        contender.wait_until_ready()  # one after the other: never do two compute at once
        free = psutil.virtual_memory().available
        print(
            f"{name} is ready after {time.monotonic() - begun:.0f} s; {free / 1e9:.1f} GB of memory are left",
            flush=True,
        )
        if free < LEAST_FREE_BYTES:
            raise BenchmarkError(
                f"too little memory for the contenders after {name}: choose fewer of them with "
                "--contenders, or a smaller net with --layers"
            )
    return running


def block(contender: Contender, number: int) -> dict[str, Any]:
    """A block on all ranks: seconds, the slowest rank's; and processor time of all its processes."""
    before = contender.used_s()
    answers = contender.ask(number)
    cpu_s = contender.used_s() - before
    slowest = {key: max(a[key] for a in answers) for key in ("wall_s", "call_s", "drain_s")}
    return {
        **slowest, "cpu_s": cpu_s, "state_bytes": answers[0]["state_bytes"],
        "step_s": [round(s, 5) for s in answers[0]["step_s"]],
    }  # fmt: skip


def teller(cores: int) -> Callable[[int, Mapping[str, Sequence[dict[str, Any]]]], str]:
    """Makes the line after each round: what the latest saves stalled, and the cores' share of their work."""
    begun = time.monotonic()

    def told(done: int, blocks: Mapping[str, Sequence[dict[str, Any]]]) -> str:
        latest = {name: of_blocks(found[-1], cores) for name, found in blocks.items()}
        each = "  ".join(f"{n} {c.stall_s:.2f}|{c.processor_s:.2f}" for n, c in latest.items())
        return f"round {done} after {time.monotonic() - begun:.0f} s, stall|cores, s: {each}"

    return told


if __name__ == "__main__":
    sys.exit(main())
