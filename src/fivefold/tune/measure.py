"""What a net really takes here: its steps as a rank carries them out, and the update of its weights.

A core is slower while others compute: so other processes keep them busy meanwhile, as other ranks would.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from fivefold.cluster import granted_cores
from fivefold.cluster.description import LinkCost
from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh.heap import keep_memory
from fivefold.parallel.pipeline.timing import Timed, timed
from fivefold.parallel.program.costs import Costs
from fivefold.plan import Layout, Plan, Tiles
from fivefold.tune.talk import measured_between

__all__ = ["Measured", "measuring", "others_busy"]


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
