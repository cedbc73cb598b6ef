"""Phases of a step and its end, told by scripts that know nothing of Fivefold.

    DataLoader       load ─┐ (forward: what follows, until backward begins)
    autograd               └─ forward ─┐
                                       └─ backward ─┐
    optimizer.step                                  └ ... update ─┤ the step ends

Where a span of `fivefold.span` says what the script does, that counts. Used where FIVEFOLD_TRACE is set.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # noqa: TID251 - scripts start it themselves
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fivefold.comm.tracing import begin, met, trace_folder
from fivefold.comm.tracing_groups import trace_groups
from fivefold.errors import FivefoldError
from fivefold.launch.environment import ALONE, RankPlace, locate
from fivefold.torch_private import loader_iterator_class, norm_functions
from fivefold.trace.current import current, usage
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.ready import ready_batches
from fivefold.trace.schema import PHASES, TAGS
from fivefold.trace.trace import Trace

__all__ = ["install"]

_LOAD, _FORWARD, _BACKWARD, _UPDATE, _VALIDATE = (
    PHASES.index(phase)
    for phase in (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.VALIDATE)
)
_BATCH_NORM = TAGS.index(Tag.BATCH_NORM)


class _Steps:
    """Where the script stands in a step."""

    def __init__(self) -> None:
        self.assumed = False
        """whether the phase on top was begun by us, from what came before"""
        self.loads = False
        """whether batches come from a loader that we see"""
        self.samples = 0
        self.refused = False
        """whether a trace could not be begun: that was told, and is not tried again in every step"""

    def assume(self, trace: Trace, phase: int) -> None:
        if not trace.nested and trace.push(phase):
            self.assumed = True

    def settle(self, trace: Trace) -> None:
        """What we assumed is over: something begins that we know."""
        if self.assumed and trace.nested == 1:
            trace.pop()
        self.assumed = self.assumed and trace.nested > 1


_steps = _Steps()


@functools.cache
def install() -> None:
    """Have torch tell us, where a trace is asked for. Calling it again does nothing."""
    if trace_folder() is None:
        return
    trace_groups()
    initialize = c10d.init_process_group

    @functools.wraps(initialize)
    def initialized(*args: Any, **named: Any) -> None:
        initialize(*args, **named)
        _begin_with(dist.group.WORLD)  # noqa: TID251 - the script's own

    modules: tuple[Any, ...] = (c10d, dist)
    for module in modules:
        module.init_process_group = initialized
    iterator = loader_iterator_class()
    iterator.__next__ = _loading(iterator.__next__)
    torch.autograd.backward = _going_back(torch.autograd.backward)
    register_optimizer_step_pre_hook(_before_update)
    register_optimizer_step_post_hook(_after_update)
    for name in ("forward", "backward"):
        setattr(
            norm_functions().SyncBatchNorm,
            name,
            staticmethod(_for_batch_norm(getattr(norm_functions().SyncBatchNorm, name))),
        )


def _begin_with(group: Any) -> None:
    """torch.distributed runs: begin the trace, or tell one that began before what it lacks. Collective."""
    folder = trace_folder()
    if folder is None or group is None:
        return
    if current.trace is not None:
        current.trace.update_meta(**met(group))
        return
    rank, size = int(group.rank()), int(group.size())
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
    local_rank = int(os.environ.get("LOCAL_RANK") or rank % local_size)
    place = RankPlace(rank, size, local_rank, local_size, _launcher())
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    begin(folder, place, group, device, backend=str(c10d.get_backend(group)))


def _launcher() -> str:
    try:
        return locate().launcher
    except FivefoldError:
        return "unknown"


def _trace() -> Trace | None:
    """The trace, begun for a script of one process that never starts torch.distributed."""
    trace = current.trace
    if trace is not None or _steps.refused or c10d.is_initialized():
        return trace
    if multiprocessing.parent_process() is None:
        folder = trace_folder()
        place = _alone()
        if folder is not None and place is not None:
            trace = begin(folder, place, None, torch.device("cpu"))
            _steps.refused = trace is None
    return trace


def _alone() -> RankPlace | None:
    """Our place if we are on our own; ranks of a job begin theirs when they meet."""
    try:
        place = locate()
    except FivefoldError:
        return ALONE
    return place if place.world_size == 1 else None


def _ours(trace: Trace | None) -> bool:
    """Whether steps are for us to find: of the training thread, and not told by a loop of Fivefold's."""
    return trace is not None and not trace.told_steps and trace.is_here()


def _loading(take: Any) -> Any:
    @functools.wraps(take)
    def load(iterator: Any) -> Any:
        trace = _trace()
        if trace is None or not trace.is_here() or trace.phase == _LOAD:
            return take(iterator)
        _steps.settle(trace)
        _steps.loads = True
        if (ready := ready_batches(iterator)) is not None:
            trace.ready(ready)
        trace.push(_LOAD)
        try:
            batch = take(iterator)
        finally:
            trace.pop()
        if _ours(trace):
            _steps.samples += _samples(batch)
            _steps.assume(trace, _FORWARD if torch.is_grad_enabled() else _VALIDATE)
        return batch

    return load


def _samples(batch: Any) -> int:
    """Leading dim of the first tensor of a batch; 0 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = [*cast("Mapping[Any, Any]", batch).values()]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return next((n for part in cast("Sequence[Any]", batch) if (n := _samples(part))), 0)
    return 0


def _going_back(backward: Any) -> Any:
    @functools.wraps(backward)
    def run(*args: Any, **named: Any) -> Any:
        trace = _trace()
        if trace is None or not trace.is_here() or trace.phase == _BACKWARD:
            return backward(*args, **named)
        _steps.settle(trace)
        trace.push(_BACKWARD)
        try:
            return backward(*args, **named)
        finally:
            trace.pop()

    return run


def _before_update(*_: Any) -> None:
    trace = _trace()
    if trace is not None and _ours(trace):
        _steps.settle(trace)
        trace.push(_UPDATE)


def _after_update(*_: Any) -> None:
    trace = current.trace
    if trace is None or not _ours(trace) or trace.phase != _UPDATE:
        return
    trace.pop()
    trace.step_ended(samples=_steps.samples)
    _steps.samples = 0
    if not _steps.loads:
        _steps.assume(trace, _FORWARD)


def _for_batch_norm(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        outer, usage.tag = usage.tag, _BATCH_NORM
        try:
            return function(*args)
        finally:
            usage.tag = outer

    return run
