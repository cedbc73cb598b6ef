"""How long a run waits for its state after a loss: xor rebuilds one node, or everything is read back.

    python benchmarks/checkpoint/recovery.py

Four nodes; in each round a save, then every way once, in an order that changes. Imports and the start of
processes are not counted: they are the same for all.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import report
from contender import BenchmarkError, leave_properly
from contenders import HERE
from figures import environment
from publishing import keep
from rounds import order
from throttle import Throttle

from nodes import Nodes, refusal

NODES, MIB = 4, 1 << 20


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="of the net, 50 MB of state each")
    parser.add_argument("--throttle", type=float, default=200e6, help="of what is shared, bytes/s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    asked = parser.parse_args()
    with leave_properly():
        result = measured(asked.rounds, asked.layers, asked.throttle)
        print(f"\n{report.section(result)}\n", flush=True)
        keep(result, "recovery", asked.results, HERE, report.renewed)
    return 0


def measured(rounds: int, layers: int, throttle: float) -> dict[str, Any]:
    """Seconds of each way, by round."""
    if problem := refusal():
        raise BenchmarkError(f"this machine makes no nodes: {problem}")
    before = environment()
    seconds: dict[str, list[float]] = {way: [] for way in report.WAYS_BACK}
    size = 0
    with tempfile.TemporaryDirectory(prefix="fivefold-throttle-") as build:
        slow = Throttle(Path(build), throttle)
        for number in range(rounds):
            for way in order(list(seconds), number):
                with Nodes(NODES, 4096 * MIB, shared_bytes=4096 * MIB) as nodes:
                    job = ranks(nodes, layers, slow)
                    job("save")
                    lose(way, nodes)
                    took, size = job("dcp" if way == "dcp" else "load")
                    seconds[way].append(took)
            latest = "  ".join(f"{way} {own[-1]:.2f} s" for way, own in seconds.items())
            print(f"round {number + 1}: {latest}", flush=True)
    import torch

    return {
        "part": "recovery", "nodes": NODES, "rounds": rounds, "state_bytes": size,
        "throttle_bytes_per_s": throttle, "seconds": seconds,
        "environment": {
            **before, "torch": torch.__version__, "disturbed_rounds": 0, "used_by_others": 0.0,
        },
    }  # fmt: skip


def lose(way: str, nodes: Nodes) -> None:
    """What a way is measured after."""
    lost = {"one-lost": [1], "all-lost": list(range(NODES))}.get(way, [])
    for node in lost:
        nodes.replace(node)


def ranks(nodes: Nodes, layers: int, slow: Throttle) -> Callable[[str], tuple[float, int]]:
    """A job on all nodes: seconds of the slowest rank, and bytes of state."""

    def job(way: str) -> tuple[float, int]:
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
