"""What messages and sums between two ranks of this machine take, as runs send them.

`fivefold run -n 2 talk.py FILE` writes it to a file, as JSON; `measured_link` has that done.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold import comm
from fivefold.cluster.description import Link
from fivefold.errors import FivefoldError
from fivefold.mesh import start
from fivefold.plan import Layout, Plan
from fivefold.trace import Tag

__all__ = ["main", "measured_link"]

_SMALL, _LARGE = 64, 1 << 18
"""numbers in a message"""
_WAIT_S = 120.0


def measured_link() -> Link:
    """Between two processes that this one begins; a few seconds. Raises `FivefoldError` if they fail."""
    with tempfile.TemporaryDirectory(prefix="fivefold-talk-") as folder:
        found = Path(folder) / "link.json"
        words = [sys.executable, "-m", "fivefold", "run", "-n", "2", "--log-dir", folder]
        done = subprocess.run(
            [*words, __file__, str(found)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
        if done.returncode:
            raise FivefoldError(
                f"two processes that should talk to each other ended with exit code {done.returncode}: "
                f"{done.stderr.strip()[-500:]}"
            )
        return Link(**json.loads(found.read_text(encoding="utf-8")))


def main() -> None:
    """One of the two."""
    torch.set_num_threads(1)
    with start(Plan(layout=Layout(width=2)), device="cpu") as mesh:
        group = mesh.group("width")
        small_s, large_s = (_seconds(_swap(size, group)) for size in (_SMALL, _LARGE))
        few = torch.zeros(_SMALL, dtype=torch.float64)
        sum_s = statistics.mean(
            [
                _seconds(lambda: comm.all_reduce(few, group, Tag.CONTROL)),
                _seconds(lambda: comm.all_gather(few, group, Tag.CONTROL)),
            ]
        )
        if mesh.rank == 0:
            # On a busy machine a small message may seem to take as long as a large one.
            latency_s = min(small_s, large_s / 2)
            per_s = 4 * (_LARGE - _SMALL) / (large_s - latency_s)
            told = {"latency_s": latency_s, "bytes_per_s": per_s, "reduction_s": sum_s}
            Path(sys.argv[1]).write_text(json.dumps(told), encoding="utf-8")


def _swap(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """Send something, and get as much."""
    sent, peer = torch.zeros(size), 1 - group.rank()
    into = torch.empty_like(sent)
    return lambda: comm.start_messages({peer: sent}, {peer: into}, group, Tag.CONTROL).wait()


def _seconds(run: Callable[[], object]) -> float:
    """The median of a few."""
    taken: list[float] = []
    for _ in range(50):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[10:])


if __name__ == "__main__":
    main()
