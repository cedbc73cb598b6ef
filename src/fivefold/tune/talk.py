"""What messages and sums between two ranks of this machine take, as runs send them.

A rank computes until it sends. Whoever carries messages has to be woken then, ranks are not ready at the same
moment, and what they need is no longer in the cache: all that is part of what a message takes, and a loop of
nothing but messages would not see it. So they are timed between computations, which are subtracted.

`fivefold run -n 2 talk.py FILE BACKEND` writes it to a file, as JSON; `measured_between` has that done.
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
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fivefold import comm
from fivefold.cluster.description import LinkCost
from fivefold.errors import FivefoldError
from fivefold.mesh import Mesh, start
from fivefold.parallel import parallelize
from fivefold.plan import Comm, Layout, Pipeline, Plan
from fivefold.trace import Tag

__all__ = ["Between", "main", "measured_between"]

_SMALL, _LARGE = 64, 1 << 18
"""numbers in a message"""
_TIMES = 110
_MICRO_BATCHES = 8
_WAIT_S = 120.0


@dataclass(frozen=True)
class Between:
    """What two ranks of this machine need to work together."""

    link: LinkCost
    action_s: float
    """of a pipeline: what a forward or backward of a stage takes besides its computation, in which messages
    are posted and unpacked, the micro-batch is looked up, and the loss is shared"""


def measured_between(backend: str = "auto") -> Between:
    """By two processes that this one begins, over a backend as in `comm.backend`; a few seconds.

    Raises `FivefoldError` if they fail.
    """
    with tempfile.TemporaryDirectory(prefix="fivefold-talk-") as folder:
        found = Path(folder) / "link.json"
        words = [sys.executable, "-m", "fivefold", "run", "-n", "2", "--log-dir", folder]
        done = subprocess.run(
            [*words, __file__, str(found), backend],
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
        told = json.loads(found.read_text(encoding="utf-8"))
        return Between(LinkCost(**told["link"]), told["action_s"])


def main() -> None:
    """One of the two."""
    torch.set_num_threads(1)
    plan = Plan(
        layout=Layout(pipe=2),
        pipeline=Pipeline("gpipe", _MICRO_BATCHES),
        comm=Comm(backend=sys.argv[2]),
    )
    with start(plan, device="cpu") as mesh:
        group = mesh.group("pipe")
        compute = _computation()
        small_s, large_s = (_added_s(compute, _swap(size, group)) for size in (_SMALL, _LARGE))
        few = torch.zeros(_SMALL, dtype=torch.float64)
        sum_s = statistics.mean(
            [
                _added_s(compute, lambda: comm.all_reduce(few, group, Tag.CONTROL)),
                _added_s(compute, lambda: comm.all_gather(few, group, Tag.CONTROL)),
            ]
        )
        action_s = _action_s(mesh)
        if mesh.rank == 0:
            # On a busy machine a small message may seem to take as long as a large one.
            latency_s = min(small_s, large_s / 2)
            per_s = 4 * (_LARGE - _SMALL) / (large_s - latency_s)
            link = {"latency_s": latency_s, "bytes_per_s": per_s, "reduction_s": sum_s}
            told = {"link": link, "action_s": action_s}
            Path(sys.argv[1]).write_text(json.dumps(told), encoding="utf-8")


def _action_s(mesh: Mesh) -> float:
    """Processor time of a step of two stages that compute next to nothing, by action."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    x = torch.rand(_MICRO_BATCHES, 1, 2, 2)
    model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
    step_s = _seconds(lambda: model.step(x, x), time.thread_time)
    return step_s / (2 * _MICRO_BATCHES)


def _swap(size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """Send something, and get as much."""
    sent, peer = torch.zeros(size), 1 - group.rank()
    into = torch.empty_like(sent)
    return lambda: comm.start_messages({peer: sent}, {peer: into}, group, Tag.CONTROL).wait()


def _computation() -> Callable[[], object]:
    """A layer, forward and backward: a millisecond or two."""
    layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.rand(2, 8, 48, 48)
    return lambda: layer(x).sum().backward()


def _added_s(compute: Callable[[], object], run: Callable[[], object]) -> float:
    """What `run` adds to a computation in front of it: the difference of two medians."""

    def both() -> None:
        compute()
        run()

    with_run, without = (_seconds(what) for what in (both, compute))
    return max(with_run - without, 1e-6)


def _seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of some."""
    taken: list[float] = []
    for _ in range(_TIMES):
        begin = clock()
        run()
        taken.append(clock() - begin)
    return statistics.median(taken[10:])


if __name__ == "__main__":
    main()
