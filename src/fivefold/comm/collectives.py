"""Collectives that say what they are for.

Each takes the ProcessGroup to use and a usage `Tag`; none touches torch's default group. The time the
caller is blocked is recorded under the tag. A failure names rank, operation and tag: the text that the
backends raise ("Connection closed by peer") says none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.events import event
from fivefold.comm.hang import explained
from fivefold.comm.replay import current_log
from fivefold.comm.shared_group import SharedGroup
from fivefold.errors import FivefoldError
from fivefold.torch_private import backend_of_device, broadcast_coalesced
from fivefold.trace import Tag, span
from fivefold.trace.current import usage

__all__ = [
    "CommError",
    "Pending",
    "all_gather",
    "all_reduce",
    "broadcast_all",
    "broadcast_text",
    "by_the_host",
    "named",
    "reduce_scatter",
    "start_all_reduce",
]

# torch 2.13 renamed both and warns of the names that 2.11 has.
_all_gather_single: Callable[..., Any] = vars(dist).get(
    "all_gather_single", vars(dist)["all_gather_into_tensor"]
)
_reduce_scatter_single: Callable[..., Any] = vars(dist).get(
    "reduce_scatter_single", vars(dist)["reduce_scatter_tensor"]
)


_NUMBERS = {tag: number for number, tag in enumerate(Tag)}
_MESSAGE_BYTES = 250 << 20
"""the most that `broadcast_all` packs into one message"""


class CommError(FivefoldError):
    """A collective failed: a rank died, never arrived within the timeout, or asked for something else."""


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, tag: Tag) -> Tensor:
    """Sum `tensor` over the ranks of `group`, in place; returns it."""
    log = current_log()
    if log is not None and log.complete:
        return tensor.copy_(log.tensor())
    if group.size() > 1:
        with named("all_reduce", group, tag):
            dist.all_reduce(tensor, group=group)
    if log is not None:
        log.add(tensor.clone())
    return tensor


@dataclass
class Pending:
    """A collective under way; `wait` returns its result, and may be called again."""

    tensor: Tensor
    work: dist.Work | None
    group: dist.ProcessGroup
    tag: Tag

    def wait(self) -> Tensor:
        """Block until the result is there (on a GPU: until the stream may use it)."""
        if self.work is not None:
            with named("all_reduce", self.group, self.tag):
                self.work.wait()
            self.work = None
        return self.tensor


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup, tag: Tag) -> Pending:
    """Begin to sum `tensor` over `group`, in place. Do not touch it before `Pending.wait`."""
    if group.size() == 1:
        return Pending(tensor, None, group, tag)
    with named("all_reduce", group, tag):
        work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(tensor, work, group, tag)


def all_gather(tensor: Tensor, group: dist.ProcessGroup, tag: Tag) -> Tensor:
    """The tensors of all ranks, which have one shape (*s), stacked in rank order: (ranks, *s)."""
    if group.size() == 1:
        return tensor.unsqueeze(0)
    log = current_log()
    if log is not None and log.complete:
        return log.tensor()
    gathered = tensor.new_empty((group.size() * tensor.numel(),))
    with named("all_gather", group, tag):
        _all_gather_single(gathered, tensor.contiguous().view(-1), group=group)
    every = gathered.view(group.size(), *tensor.shape)
    if log is not None:
        log.add(every)
    return every


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup, tag: Tag) -> Tensor:
    """The adjoint of `all_gather`: sum the tensors (ranks, *s) over the group, return one's own (*s)."""
    if group.size() == 1:
        return tensor.squeeze(0)
    given = tensor.cpu() if by_the_host(tensor.device, group) else tensor
    own = given.new_empty(given.shape[1:])
    with named("reduce_scatter", group, tag):
        _reduce_scatter_single(own.view(-1), given.contiguous().view(-1), group=group)
    return own.to(tensor.device)


def by_the_host(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether messages and parts of sums from `device` have to pass through memory of the host.

    So it is where ranks share a GPU, which NCCL refuses: gloo sums tensors of a GPU, gathers and broadcasts
    them, but takes the address of one that is sent or scattered for one of the host.
    """
    if device.type != "cuda":
        return False
    return isinstance(group, SharedGroup) or backend_of_device(group, device).name() == "gloo"


def broadcast_text(
    text: str | None, group: dist.ProcessGroup, device: torch.device, *, source: int = 0
) -> str:
    """What one rank of `group` says; the others' `text` is ignored. Plain bytes, no pickle."""
    if group.size() == 1:
        return text or ""
    data = torch.tensor(list((text or "").encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    with named("broadcast", group, Tag.CONTROL):
        dist.broadcast(length, group=group, group_src=source)
        buffer = data if group.rank() == source else data.new_empty(int(length.item()))
        dist.broadcast(buffer, group=group, group_src=source)
    return bytes(buffer.tolist()).decode()


def broadcast_all(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, tag: Tag, *, source: int = 0
) -> None:
    """Overwrite `tensors` with those of one rank of `group`; one message per dtype and device."""
    if group.size() == 1 or not tensors:
        return
    sent = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    with named("broadcast", group, tag):
        # Packing dozens of small tensors from Python takes 2 ms.
        broadcast_coalesced(group, sent, _MESSAGE_BYTES, source)


@contextmanager
def named(operation: str, group: dist.ProcessGroup, tag: Tag) -> Generator[None]:
    """Record the block under `tag`, for a profiler of torch as well; what fails in it becomes a `CommError`
    that says who did what.
    """
    outer, usage.tag = usage.tag, _NUMBERS[tag]
    with span(tag), event(operation, None, tag.value):
        try:
            yield
        except RuntimeError as problem:
            first = (
                str(problem).strip().splitlines()[0] if str(problem).strip() else "no reason given"
            )
            told = explained(problem)
            raise CommError(
                f"rank {group.rank()} of {group.size()}: {operation} for {tag.value} failed: {first}. "
                "A rank died, is stuck, is cut off, ended before this, or called something else; its log "
                "says which. If ranks are only slow, raise comm.timeout_s in the plan."
                + (f"\n{told}" if told else "")
            ) from problem
        finally:
            usage.tag = outer
