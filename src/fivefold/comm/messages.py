"""Point-to-point messages: at most one to and one from each peer, all under way at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fivefold.comm.collectives import by_the_host, named
from fivefold.comm.replay import current_log
from fivefold.comm.tensors import beside
from fivefold.trace import Tag

__all__ = ["Messages", "start_messages"]


@dataclass
class Messages:
    """Messages under way; `wait` returns what was received, by peer."""

    buffers: Mapping[int, Tensor]
    works: list[dist.Work]
    kept: list[Tensor]
    """what is being sent: must stay until it has left"""
    group: dist.ProcessGroup
    tag: Tag
    arriving: Mapping[int, Tensor]
    """where messages arrive: `buffers`, or memory of the host"""

    def wait(self) -> Mapping[int, Tensor]:
        """Block until everything has arrived and left."""
        if self.works:
            with named("exchange", self.group, self.tag):
                for work in self.works:
                    work.wait()
            if self.arriving is not self.buffers:
                for peer, arrived in self.arriving.items():
                    self.buffers[peer].copy_(arrived, non_blocking=True)
            self.works.clear()
            self.kept.clear()
        return self.buffers


def start_messages(
    sent: Mapping[int, Tensor], buffers: Mapping[int, Tensor], group: dist.ProcessGroup, tag: Tag
) -> Messages:
    """Begin to send `sent[peer]` and to receive into `buffers[peer]`, contiguous tensors; peers are ranks of
    `group`.

    Messages between two ranks are matched in the order in which they are posted, so all ranks of the group
    have to make the same exchanges in the same order.
    """
    log = current_log()
    if log is not None and log.complete:
        return Messages(log.messages(), [], [], group, tag, {})
    if log is not None:
        log.add(buffers)
    peers = sorted({*sent, *buffers})
    if not peers:
        return Messages(buffers, [], [], group, tag, buffers)
    arriving = buffers
    if by_the_host(next(iter([*sent.values(), *buffers.values()])).device, group):
        sent = {peer: beside(tensor).copy_(tensor) for peer, tensor in sent.items()}
        arriving = {peer: beside(buffer) for peer, buffer in buffers.items()}
    operations: list[dist.P2POp] = []
    for peer in peers:
        if peer in arriving:
            operations.append(dist.P2POp(dist.irecv, arriving[peer], group=group, group_peer=peer))
        if peer in sent:
            operations.append(dist.P2POp(dist.isend, sent[peer], group=group, group_peer=peer))
    with named("exchange", group, tag):
        works = dist.batch_isend_irecv(operations)
    return Messages(buffers, works, list(sent.values()), group, tag, arriving)
