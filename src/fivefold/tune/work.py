"""What one rank computes and sends for a micro-batch, step by step.

A program of the rank in the middle of the tiles is laid out as arrays over its steps. All of it grows with
the number of samples, except latencies; so one program serves micro-batches of every size, and a stage is a
slice. Without measurements an operation takes as long as the slower of its arithmetic and its memory:

    seconds = max(flops / flops_per_s, bytes / bytes_per_s) + call_s          (the roofline)

With them a step takes what it took, copies of what is exchanged and calls included; messages come on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fivefold.cluster.description import Device, LinkCost
from fivefold.parallel.graph.refs import StateRef, Value
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.pipeline.timing import Timed
from fivefold.parallel.program.costs import flops_of
from fivefold.parallel.program.program import Compute, Move, Program, exchange_of
from fivefold.parallel.program.rule import Here
from fivefold.tune.saved import VIEWS, HeldBytes, held_bytes, sizes_of

__all__ = ["Links", "StageCost", "Work", "roofline"]

_NORMS = ("BatchNorm", "batch_norm")


@dataclass(frozen=True)
class Links:
    """What the ranks of a layout talk over."""

    tiles: LinkCost
    everyone: LinkCost
    """tiles and replicas"""
    tile_ranks: int
    replicas: int
    overlaps: bool


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch in one stage, on one rank."""

    forward_s: float
    backward_s: float
    weight_s: float
    """of backward: what a zero-bubble schedule may put off"""
    again_s: float
    """to compute forward again, without messages"""
    exchange_s: float
    """of forward and backward: waiting for neighbours' pixels"""
    statistics_s: float
    """of forward and backward: sums over tiles and replicas"""


@dataclass(frozen=True)
class Work:
    """Arrays over the steps of a program; what grows with the batch is per sample."""

    held: HeldBytes
    """of `rows` samples"""
    rows: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    call_s: np.ndarray
    latencies: np.ndarray
    """of an exchange, in latencies of one message"""
    sent_bytes: np.ndarray
    copied_s: np.ndarray
    """to put together what was exchanged, where that does not happen meanwhile"""
    meanwhile: np.ndarray
    """whether the exchange travels while the step computes"""
    channels: np.ndarray
    """of batch norms, 0 for other steps"""
    sums: np.ndarray
    """whether tile ranks sum something else"""

    @classmethod
    def of(cls, program: Program, here: Here, device: Device, timed: Timed | None = None) -> Work:
        """Of what `here.rank` does; `timed` has the times of `program`, if they were measured."""
        sizes, rows = sizes_of(program, here), program.tape.shapes[program.tape.inputs[0]][0]
        columns = np.zeros((10, len(program.steps)))
        for number, step in enumerate(program.steps):
            columns[4:7, number], columns[7, number] = _exchanged(program, step, device)
            if isinstance(step, Compute):
                columns[:4, number] = _computed(program, step.node, sizes, device)
                channels = _channels(step.node)
                columns[8, number] = channels
                columns[9, number] = not channels and step.local.collective is not None
        if timed is not None:
            later = np.divide(
                columns[2], columns[1], np.zeros(len(columns[1])), where=columns[1] > 0
            )
            columns[:3] = timed.forward_s, timed.backward_s, timed.backward_s * later
            columns[[3, 6]] = 0.0
        columns[[0, 1, 2, 5, 6]] /= rows
        return cls(held_bytes(program, here), rows, *columns)

    def cost(self, span: range, rows: float, links: Links) -> StageCost:
        """What the steps of `span` take for a micro-batch of `rows` samples."""
        part = slice(span.start, span.stop)
        call = self.call_s[part]
        forward, backward = rows * self.forward_s[part] + call, rows * self.backward_s[part] + call
        there, back = self._exchange_s(part, rows, links, forward, backward)
        norm_there, norm_back = self._statistics_s(part, links)
        return StageCost(
            float(forward.sum() + there + norm_there),
            float(backward.sum() + back + norm_back),
            float(rows * self.weight_s[part].sum()),
            float(forward.sum()),
            there + back,
            norm_there + norm_back,
        )

    def _exchange_s(
        self, part: slice, rows: float, links: Links, forward: np.ndarray, backward: np.ndarray
    ) -> tuple[float, float]:
        link, posted = links.tiles, self.latencies[part]
        each = posted * link.latency_s + rows * self.sent_bytes[part] / link.bytes_per_s
        copied = rows * self.copied_s[part]
        hidden = self.meanwhile[part] * (1.0 if links.overlaps else 0.0)
        there = np.maximum(each - hidden * forward, 0.0) + copied
        back = np.maximum(each - hidden * backward, 0.0) + 2 * copied
        return float(there.sum()), float(back.sum())

    def _statistics_s(self, part: slice, links: Links) -> tuple[float, float]:
        """Batch norm gathers count, mean and variance, and sums two gradients, all in float64."""
        ranks = links.tile_ranks * links.replicas
        channels = self.channels[part]
        there = back = 0.0
        if ranks > 1:
            for c, times in Counter(channels[channels > 0].tolist()).items():
                there += times * links.everyone.all_gather_s(8 * (2 * c + 1), ranks)
                back += times * links.everyone.all_reduce_s(16 * c, ranks)
        if links.tile_ranks > 1:
            others = float(self.sums[part].sum()) * links.tiles.all_reduce_s(0, links.tile_ranks)
            there, back = there + others, back + others
        return there, back


def roofline(
    node: Node, elements: float, read_bytes: float, made_bytes: float, device: Device
) -> float:
    """Seconds of a node's forward that makes `elements`, without its call."""
    if node.name in VIEWS:
        return 0.0
    heavy = node.name.startswith(("conv", "linear", "matmul", "bmm"))
    flops = flops_of(node) * elements if heavy else elements
    return max(flops / device.flops_per_s, (read_bytes + made_bytes) / device.bytes_per_s)


def _channels(node: Node) -> int:
    """Of a batch norm; 0 for other nodes."""
    shape = list(node.shapes[0]) if node.shapes else []
    return shape[1] if node.name.startswith(_NORMS) and len(shape) > 1 else 0


def _computed(
    program: Program, node: Node, sizes: Mapping[int, int], device: Device
) -> tuple[float, float, float, float]:
    """Seconds of forward, backward, of the weights' part of backward, and of the call."""
    read = [ref.index for ref in node.operands if isinstance(ref, Value)]
    made = sum(sizes[index] for index in node.outputs)
    seconds = roofline(
        node, made / node.output_bytes, sum(sizes[index] for index in read), made, device
    )
    weighted = any(isinstance(ref, StateRef) for ref in node.operands)
    deferred = weighted and node.name.startswith(("conv", "linear"))
    first = deferred and bool(read) and read[0] in program.tape.inputs
    back = seconds * (1.0 if first else 2.0)  # nobody asks for the gradient of the images
    call_s = 0.0 if node.name in VIEWS else device.call_s
    return seconds, back, (back / 2 if deferred and not first else 0), call_s


def _exchanged(
    program: Program, step: Compute | Move, device: Device
) -> tuple[tuple[float, float, float], bool]:
    """Latencies, bytes sent and seconds of copies of what a step exchanges; whether it computes meanwhile."""
    moved = exchange_of(step)
    if moved is None:
        return (0.0, 0.0, 0.0), False
    source, plan = moved
    each = program.tape.element_bytes(source)
    posted = 1 + 0.25 * max(plan.messages() - 1, 0)
    meanwhile = isinstance(step, Compute)
    held = 0 if meanwhile else math.prod(plan.result) * each
    return (posted, plan.elements() * each, 2 * held / device.bytes_per_s), meanwhile
