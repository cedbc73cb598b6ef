"""Ranks on nodes of their own: namespaces with a disk and a network interface each (tests/nodes.py).

    python on_nodes.py --nodes 4 --disk-mib 1024 --throttle 200e6 script.py words...

starts `script.py` on every node with torchrun's variables; LOCAL is the node's own disk, SHARED the parallel
file system, both in memory, the second with a limit on its speed. Ends with the first rank that fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from contender import leave_properly
from throttle import Throttle

from nodes import Job, Nodes, refusal

MIB = 1 << 20


def options() -> tuple[argparse.Namespace, list[str]]:
    """The command line; the second part is the script's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--disk-mib", type=int, default=2048, help="of a node, and of what they share"
    )
    parser.add_argument("--throttle", type=float, default=200e6, help="bytes/s of what they share")
    return parser.parse_known_args()


def main() -> int:
    """Run the script on all nodes; the exit code of the rank that ends first with one."""
    asked, script = options()
    if problem := refusal():
        print(f"error: this machine makes no nodes: {problem}", file=sys.stderr)
        return 1
    size = asked.disk_mib * MIB
    with (
        leave_properly(),
        tempfile.TemporaryDirectory(prefix="fivefold-throttle-") as build,
        Nodes(asked.nodes, size, shared_bytes=size) as nodes,
    ):
        slow = Throttle(Path(build), asked.throttle).variables(nodes.shared)
        return ended(nodes.job([sys.executable, *script], env=lambda _: slow))


def ended(job: Job) -> int:
    """Wait for all ranks, or for one that fails."""
    try:
        while True:
            codes = [rank.code for rank in job.ranks]
            if failed := next((code for code in codes if code), None):
                print(job.told())
                return abs(failed)
            if None not in codes:
                return 0
            time.sleep(0.05)
    finally:
        job.end()


if __name__ == "__main__":
    sys.exit(main())
