"""What an exchange costs against computing the same pixels once more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold import comm
from fivefold.cluster.description import LinkCost
from fivefold.parallel.graph.tape import Node
from fivefold.trace import Tag

__all__ = ["Costs", "Fuse", "Options", "fastest", "flops_of", "measured", "measured_processor"]

Fuse = str | int
"""`auto`, `never`, or the largest number of layers that share an exchange"""


@dataclass(frozen=True)
class Costs:
    """Times of one rank's processor and of messages to its neighbours."""

    latency_s: float = 1e-4
    """of a message of no size"""
    bytes_per_s: float = 1e9
    flops_per_s: float = 5e10
    copied_bytes_per_s: float = 5e9
    overlaps: bool = True
    """whether messages travel while a tile is computed"""

    def exchange_s(self, messages: int, size_bytes: int) -> float:
        """One exchange: its messages travel at once, but each has to be posted."""
        return self.latency_s * (1 + 0.25 * max(messages - 1, 0)) + size_bytes / self.bytes_per_s

    def together_s(self, messages: int, sent_bytes: int, held_bytes: int) -> float:
        """An exchange and its adjoint, where what is held and what is received are put together.

        Tensors are copied to that end forward, once more in backward, and their gradient is cut.
        """
        return 2 * self.exchange_s(messages, sent_bytes) + 3 * held_bytes / self.copied_bytes_per_s

    def apart_s(self, messages: int, sent_bytes: int, compute_s: float) -> float:
        """An exchange and its adjoint that travel while a tile is computed, which takes `compute_s`."""
        each = self.exchange_s(messages, sent_bytes)
        if not self.overlaps:
            return 2 * each
        return max(each - compute_s, 0.0) + max(each - 2 * compute_s, 0.0)

    def compute_s(self, flops: float) -> float:
        """Some floating-point operations."""
        return flops / self.flops_per_s

    def forward_s(self, node: Node) -> float:
        """A whole node: its arithmetic, and its operands and results through memory."""
        elements = sum(math.prod(shape) for shape in (*node.shapes, *node.output_shapes))
        moved_s = elements * node.output_bytes / self.copied_bytes_per_s
        if flops_of(node) == _MEMORY_BOUND:
            return moved_s
        made = sum(math.prod(shape) for shape in node.output_shapes)
        return self.compute_s(made * flops_of(node)) + moved_s


@dataclass(frozen=True)
class Options:
    """How plans are made."""

    fuse: Fuse = "auto"
    strict: bool = False
    """whether an unknown operation is an error"""
    costs: Costs = field(default_factory=Costs)
    bordered: bool = True
    """whether what a rank owns may be computed while what it is sent travels, see `border`"""


_MEMORY_BOUND = 20
"""operations that one element of a pointwise result costs as much as: it waits for memory"""


def flops_of(node: Node) -> float:
    """Floating-point operations of one element of a node's result, forward."""
    if node.name.startswith("conv_transpose"):
        return 2.0 * math.prod(node.shapes[1]) / node.shapes[1][0]
    if node.name.startswith("conv"):
        return 2.0 * math.prod(node.shapes[1][1:])
    if node.name == "linear":
        return 2.0 * node.shapes[1][-1]
    return float(_MEMORY_BOUND)


def measured(group: dist.ProcessGroup, everyone: dist.ProcessGroup, device: torch.device) -> Costs:
    """Measure them between the ranks of `group`, once, at the start. Collective.

    All ranks of `everyone` get the first one's figures: replicas have to make the same plan, since they share
    statistics. Rounded to powers of two: the same machine gives the same plan.
    """
    small, large = 256, 1 << 18
    peer = group.rank() ^ 1
    times: dict[int, float] = {}
    for size in (small, large):
        buffer = torch.zeros(size, device=device)
        taken: list[float] = []
        for _ in range(4):
            begin = time.perf_counter()
            if peer < group.size():
                comm.start_messages(
                    {peer: buffer}, {peer: torch.empty_like(buffer)}, group, Tag.CONTROL
                ).wait()
            taken.append(time.perf_counter() - begin)
        times[size] = min(taken)
    link = LinkCost.through((4 * small, times[small]), (4 * large, times[large]))
    found = torch.tensor(
        [
            link.latency_s,
            link.bytes_per_s,
            *measured_processor(device),
        ],
        dtype=torch.float64,
        device=device,
    )
    comm.broadcast_all([found], everyone, Tag.CONTROL)
    latency_s, bytes_per_s, flops_per_s, copied = (
        2.0 ** round(math.log2(value)) for value in found.tolist()
    )
    return Costs(latency_s, bytes_per_s, flops_per_s, copied)


def measured_processor(device: torch.device) -> tuple[float, float]:
    """Floating-point operations per second of convolutions, and bytes per second that are copied."""
    samples, channels, edge = (1, 32, 64) if device.type == "cpu" else (8, 64, 128)
    x = torch.zeros(samples, channels, edge, edge, device=device)
    weight = torch.zeros(channels, channels, 3, 3, device=device)
    flops = 2 * samples * channels**2 * 9 * (edge - 2) ** 2
    # More than a cache holds, and twice the same memory: what is touched first is slow once.
    source = torch.ones(1 << (23 if device.type == "cpu" else 24), device=device)
    target = torch.ones_like(source)
    with torch.no_grad():
        convolved_s = fastest(lambda: F.conv2d(x, weight).sum())
        copied_s = fastest(lambda: target.copy_(source))
    return flops / convolved_s, 4 * source.numel() / copied_s


def fastest(run: Callable[[], Tensor], looks: int = 4) -> float:
    """Seconds of the fastest of a few runs; the results are waited for."""
    taken: list[float] = []
    for _ in range(looks):
        begin = time.perf_counter()
        float(run().flatten()[0])
        taken.append(time.perf_counter() - begin)
    return max(min(taken), 1e-9)
