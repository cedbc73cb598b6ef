"""What a net really takes here: its steps as a rank carries them out, and the update of its weights.

A core is slower while others compute: so other processes keep them busy meanwhile, as other ranks would.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fivefold import comm
from fivefold.cluster import granted_cores
from fivefold.cluster.description import LinkCost
from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh import Mesh, start
from fivefold.mesh.heap import keep_memory
from fivefold.parallel import parallelize
from fivefold.parallel.pipeline.timing import Timed, timed
from fivefold.parallel.program.costs import Costs
from fivefold.plan import Comm, Layout, Pipeline, Plan, Tiles
from fivefold.trace import Tag

__all__ = ["Measured", "measured_between", "measuring", "others_busy"]


class Measured:
    """Times of a net on one core, each measured when it is first asked for. See `measuring`."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: str,
        fuse: str,
        progress: Callable[[str], None],
        dtype: torch.dtype,
    ) -> None:
        self._net = net
        self.alone = 1.0
        """how many times as fast a core is while the others idle"""
        self.link: LinkCost | None = None
        """between two ranks, where more than one shall run"""
        self.action_s = 0.0
        """of a pipeline: what a forward or backward of a stage takes besides computing"""
        self._optimizer, self._fuse, self._progress, self._dtype = optimizer, fuse, progress, dtype
        self._known: dict[tuple[Layout, tuple[int, ...]], Timed] = {}
        self._update_s: float | None = None

    def steps(
        self, layout: Layout, rank: int, shape: tuple[int, ...], costs: Costs | None = None
    ) -> Timed:
        """The steps of a rank for samples of this shape, those of one replica. Raises `UsageError`."""
        key = (layout, shape)
        if key not in self._known:
            self._progress(f"{layout}, {'x'.join(map(str, shape))}")
            self._known[key] = self.again(layout, rank, shape, costs)
        return self._known[key]

    def again(
        self, layout: Layout, rank: int, shape: tuple[int, ...], costs: Costs | None = None
    ) -> Timed:
        """The same, whether it was measured or not."""
        plan = Plan(layout=layout, tiles=Tiles(fuse=self._fuse))
        example = torch.empty(shape, dtype=self._dtype, device="meta")
        with _one_thread():
            return timed(self._net, plan, rank, example, costs=costs, kept=True)

    @property
    def update_s(self) -> float:
        """Seconds that the optimiser takes for all parameters."""
        if self._update_s is None:
            with _one_thread():
                self._update_s = _update_s(self._net, self._optimizer)
        return self._update_s


@contextmanager
def measuring(
    net: nn.Module,
    sample: tuple[int, ...],
    ranks: int,
    *,
    optimizer: str = "sgd",
    fuse: str = "never",
    backend: str = "auto",
    progress: Callable[[str], None] = lambda _what: None,
    dtype: torch.dtype = torch.float32,
) -> Generator[Measured]:
    """Within the block, a net can be measured as one of `ranks` on this machine, while others compute.

    `sample` and `dtype` are shape and dtype of one; `backend` is what ranks talk over, as in `comm.backend`.
    For a net whose step takes seconds, every shape takes some of these.
    """
    keep_memory()  # as ranks do
    found, shape = Measured(net, optimizer, fuse, progress, dtype), (1, *sample)
    if ranks > 1:
        progress("messages")
        between = measured_between(backend)
        found.link, found.action_s = between.link, between.action_s
    others = min(ranks, granted_cores()) - 1
    quiet_s = _total(found.again(Layout(), 0, shape)) if others else 0.0
    with others_busy(others, net, (2, *sample), dtype):  # one pixel of one sample has no statistics
        if others:
            found.alone = max(_total(found.steps(Layout(), 0, shape)) / quiet_s, 1.0)
        yield found


def _total(found: Timed) -> float:
    return float(np.sum(found.forward_s) + np.sum(found.backward_s))


def _update_s(net: nn.Module, optimizer: str, repeats: int = 5) -> float:
    """The median of a few updates of copies."""
    copies = [p.detach().clone().requires_grad_() for p in net.parameters() if p.requires_grad]
    if not copies:
        return 0.0
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    optim = (
        torch.optim.Adam(copies, lr=1e-6)
        if optimizer == "adam"
        else torch.optim.SGD(copies, lr=1e-6, momentum=0.9)
    )
    taken: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        optim.step()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


@contextmanager
def others_busy(
    count: int, net: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Generator[None]:
    """Within the block, as many other processes train copies of `net` with samples of this shape.

    Other nets would not do: how much ranks slow each other depends on what they compute. Raises `UsageError`
    for a net that cannot be copied to another process, and `FivefoldError` if a process does not begin.
    """
    words = [sys.executable, "-m", "fivefold.tune.load"]
    told = _pickled(net, shape, dtype) if count else b""
    with contextlib.ExitStack() as stack:
        begun = [_begun(words, stack) for _ in range(count)]
        for process in begun:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(told)
                process.stdin.flush()
        for process in begun:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise FivefoldError(
                    f"{' '.join(words)}, which trains a copy of the net while others are measured, ended "
                    f"with exit code {process.wait()}; its message stands above"
                )
        yield


def _pickled(net: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    try:
        return pickle.dumps((net, shape, dtype))
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise UsageError(
            f"the net cannot be copied to another process ({problem}), which computes while it is measured: "
            "define its classes and functions at the top of a module, or plan without --measure"
        ) from problem


def _begun(words: list[str], stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """A process that ends when its input does, which is when the stack is left."""
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return stack.enter_context(process)


@contextmanager
def _one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- What messages and sums between two ranks of this machine take, as runs send them
#
# A rank computes until it sends. Whoever carries messages has to be woken then, ranks are not ready at the
# same moment, and what they need is no longer in the cache: all that is part of what a message takes, and a
# loop of nothing but messages would not see it. So they are timed between computations, which are subtracted.
#
# `fivefold run -n 2 talk.py FILE BACKEND` writes it to a file, as JSON; `measured_between` has that done.

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
            link = LinkCost.through((4 * _SMALL, small_s), (4 * _LARGE, large_s), sum_s)
            told = {"link": asdict(link), "action_s": action_s}
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
