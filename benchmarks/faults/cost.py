"""What it costs to watch: the thread that looks at the stack, and the figures of the machine.

    python benchmarks/faults/cost.py

The training thread convolves from the depth of a few dozen frames, as a model does; with and without a
watcher in turns. Processor time of the watcher is what the kernel counted for its thread.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import torch
from figures import Median
from torch import nn

from fivefold.comm.hang import HangWatch
from fivefold.trace.counters import OpenFile
from fivefold.trace.machine import Machine
from fivefold.trace.reader import RankTrace
from fivefold.trace.stacks import Watcher
from fivefold.trace.trace import Trace
from fivefold.trace.windows import new_row

ROUNDS, BLOCK_S = 9, 3.0


def main() -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fivefold-cost-") as folder:
        share, looks_us = watching(Path(folder))
        print(f"watcher: {looks_us:.0f} us of processor time per look, {share:.3%} of a core")
        print(f"step with it, times without: {slower(Path(folder))}")
    print("row of the machine, us: " + ", ".join(f"{k} {v:.1f}" for k, v in rows().items()))
    gc.collect()
    return 0


def deep(depth: int, work: Callable[[], object]) -> None:
    """Call `work` from that many frames further in."""
    if depth:
        deep(depth - 1, work)
    else:
        work()


def training(seconds: float) -> int:
    """How many convolutions fit into the time."""
    net, x = nn.Conv2d(16, 16, 3), torch.randn(4, 16, 32, 32)
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        deep(25, lambda: net(x))
        done += 1
    return done


def watched(folder: Path, seconds: float) -> tuple[int, float, int]:
    """Convolutions, the watcher's processor time in s, and its looks."""
    trace = Trace.create(folder, {"rank": 0, "size": 2, "local_size": 2})
    watcher = Watcher(trace)
    watcher.watchers.append(HangWatch(trace, watcher, 30.0))
    (thread,) = (t for t in threading.enumerate() if t.name == "fivefold-watch")
    file = OpenFile(Path(f"/proc/self/task/{thread.native_id}/schedstat"))
    before = int((file.read() or b"0").split()[0])
    done = training(seconds)
    used = (int((file.read() or b"0").split()[0]) - before) / 1e9
    watcher.close()
    trace.close()
    file.close()
    looks = RankTrace.load(trace.path).stacks["outside"]
    return done, used, sum(count for _, count in looks)


def watching(folder: Path) -> tuple[float, float]:
    """Share of a core, and us per look."""
    _, used_s, looks = watched(folder, 3 * BLOCK_S)
    return used_s / (3 * BLOCK_S), used_s / looks * 1e6


def slower(folder: Path) -> str:
    """Time per convolution with a watcher, relative to without, in turns."""
    found: list[float] = []
    for number in range(ROUNDS + 1):
        order = (True, False) if number % 2 else (False, True)
        done = {on: watched(folder, BLOCK_S)[0] if on else training(BLOCK_S) for on in order}
        if number:
            found.append(done[False] / done[True])
    median = Median.of(found)
    return f"{median.value:.4f} [{median.low:.4f}, {median.high:.4f}]"


def rows() -> dict[str, float]:
    """What a row costs, by how long the last one is ago."""
    machine, row = Machine(threading.get_native_id()), new_row()
    found: dict[str, float] = {}
    for name, since in (("at once", 0), ("5 ms", 5), ("20 ms", 20), ("0.5 s", 500)):
        begun, times = time.perf_counter(), 2000
        for _ in range(times):
            for attribute, least in (("_often", 5), ("_sometimes", 20), ("_rarely", 500)):
                if since >= least:
                    setattr(machine, attribute, 0)
                else:
                    setattr(machine, attribute, time.monotonic_ns())
            machine(row)
        found[name] = (time.perf_counter() - begun) / times * 1e6
    machine.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
