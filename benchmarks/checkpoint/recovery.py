"""How long a run waits for its state after a loss: xor rebuilds one node, or everything is read back.

    python benchmarks/checkpoint/recovery.py

Four nodes; in each round, for every way, a save on new nodes, the loss, and the way back, in an order that
changes. Imports and the start of processes are not counted: they are the same for all. A round that others
disturbed is measured again.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import report
from contender import BenchmarkError
from contenders import HERE
from figures import environment
from rounds import undisturbed
from throttle import Throttle

from nodes import Nodes, refusal

NODES, MIB = 4, 1 << 20
Took = tuple[float, int]
"""seconds of the slowest rank, and bytes of state"""


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="of the net, 50 MB of state each")
    parser.add_argument("--throttle", type=float, default=200e6, help="of what is shared, bytes/s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    asked = parser.parse_args()
    return report.PAGE.publish(
        ["recovery"], lambda _: measured(asked.rounds, asked.layers, asked.throttle), asked.results
    )


def measured(rounds: int, layers: int, throttle: float) -> dict[str, Any]:
    """Seconds of each way, by round."""
    if problem := refusal():
        raise BenchmarkError(f"this machine makes no nodes: {problem}")
    before = environment()
    with tempfile.TemporaryDirectory(prefix="fivefold-throttle-") as build:
        slow = Throttle(Path(build), throttle)
        ways = {way: way for way in report.WAYS_BACK}
        answers, others = undisturbed(
            ways, rounds, lambda way: there_and_back(way, layers, slow), told, own_s
        )
    import torch

    return {
        "part": "recovery", "nodes": NODES, "rounds": rounds, "state_bytes": answers["dcp"][0][1],
        "throttle_bytes_per_s": throttle,
        "seconds": {way: [took for took, _ in rounds] for way, rounds in answers.items()},
        "environment": {**before, "torch": torch.__version__, **others.told()},
    }  # fmt: skip


def own_s() -> float:
    """Processor time of this process and of all that it started: between two ways, none of them is left."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def told(done: int, answers: Mapping[str, Sequence[Took]]) -> str:
    """A line after each round."""
    latest = "  ".join(f"{way} {own[-1][0]:.2f} s" for way, own in answers.items())
    return f"round {done}: {latest}"


def there_and_back(way: str, layers: int, slow: Throttle) -> Took:
    """A save on new nodes, a loss, and the state again."""
    with Nodes(NODES, 4096 * MIB, shared_bytes=4096 * MIB) as nodes:
        job = ranks(nodes, layers, slow)
        job("save")
        lose(way, nodes)
        return job("dcp" if way == "dcp" else "load")


def lose(way: str, nodes: Nodes) -> None:
    """What a way is measured after."""
    lost = {"one-lost": [1], "all-lost": list(range(NODES))}.get(way, [])
    for node in lost:
        nodes.replace(node)


def ranks(nodes: Nodes, layers: int, slow: Throttle) -> Callable[[str], Took]:
    """A job on all nodes."""

    def job(way: str) -> Took:
        argv = [sys.executable, str(HERE / "recovery_worker.py"), way, f"--layers={layers}"]
        told = nodes.job(argv, env=lambda _: slow.variables(nodes.shared)).succeed(300.0)
        took = [
            float(s) for text in told for s in re.findall(r"^seconds (\S+)", text, re.MULTILINE)
        ]
        [size, *_] = re.findall(r"^bytes (\d+)", told[0], re.MULTILINE)
        return max(took, default=0.0), int(size)

    return job


if __name__ == "__main__":
    sys.exit(main())
