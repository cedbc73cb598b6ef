"""What the operations of a net really take here, as factors of what the roofline says.

Every operation runs alone, forward and backward, on random numbers of the shapes that one sample gives it,
those of equal shapes once. Tiles and micro-batches of other sizes are taken to have the same factors.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fivefold.cluster.description import Device
from fivefold.parallel.tiles.tape import Node, State, Tape, Value
from fivefold.tune.saved import VIEWS, changed_in_place
from fivefold.tune.work import Factors, NodeKey, key_of, roofline

__all__ = ["measured_factors"]


def measured_factors(
    net: nn.Module,
    tape: Tape,
    device: Device,
    *,
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Factors:
    """Time every node of `tape` on one thread; for a net whose step takes seconds, it takes as many.

    Nodes that do not run on random numbers keep the factor 1.
    """
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    known: dict[Any, tuple[float, float]] = {}
    found: dict[NodeKey, tuple[float, float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, node in enumerate(tape.nodes):
            key = _alike(node)
            if key not in known and node.name not in VIEWS:
                known[key] = _factor(node, tape, state, device, repeats)
            found[key_of(node)] = known.get(key, (1.0, 1.0))
            progress(number + 1, len(tape.nodes))
    finally:
        torch.set_num_threads(threads)
    return found


def _alike(node: Node) -> Any:
    options = tree_flatten((node.args, node.kwargs))[0]
    function = type(node.function).__name__ if isinstance(node.function, nn.Module) else ""
    kinds = tuple(isinstance(ref, State) for ref in node.operands)
    return (node.name, function, repr(options), node.shapes, kinds)


def _factor(
    node: Node, tape: Tape, state: dict[str, Tensor], device: Device, repeats: int
) -> tuple[float, float]:
    operands = [_operand(ref, shape, tape, state) for ref, shape in _operands(node)]
    predicted = roofline(
        node,
        sum(math.prod(shape) for shape in node.output_shapes),
        sum(4 * math.prod(shape) for ref, shape in _operands(node) if isinstance(ref, Value)),
        sum(node.output_bytes * math.prod(shape) for shape in node.output_shapes),
        device,
    )
    if not predicted:
        return (1.0, 1.0)
    try:
        there, back = _timed(node, operands, repeats)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return (1.0, 1.0)  # random numbers do not do as indices, say
    weighted = any(isinstance(ref, State) for ref in node.operands)
    first = (
        weighted and isinstance(node.operands[0], Value) and node.operands[0].index in tape.inputs
    )
    passes = 1.0 if first and node.name.startswith(("conv", "linear")) else 2.0
    spared = max(there - device.call_s, there / 2)
    return spared / predicted, max(back - device.call_s, back / 2) / (passes * predicted)


def _operands(node: Node) -> list[tuple[Any, tuple[int, ...]]]:
    return list(zip(node.operands, node.shapes, strict=True))


def _operand(ref: Any, shape: tuple[int, ...], tape: Tape, state: dict[str, Tensor]) -> Tensor:
    if isinstance(ref, State) and ref.name in state:
        return state[ref.name].detach().clone().requires_grad_(state[ref.name].requires_grad)
    dtype = tape.dtypes[ref.index] if isinstance(ref, Value) else torch.float32
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    asks = isinstance(ref, Value) and ref.index not in tape.inputs
    return torch.rand(shape, dtype=dtype).requires_grad_(asks)


def _timed(node: Node, operands: Sequence[Tensor], repeats: int) -> tuple[float, float]:
    """Fastest forward and backward, in seconds."""
    forward: list[float] = []
    backward: list[float] = []
    wanted = [tensor for tensor in operands if tensor.requires_grad]
    function = node.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function)  # its buffers stay as they are
        wanted += list(function.parameters())
    for _ in range(repeats + 1):
        given = [t * 1 for t in operands] if changed_in_place(node) else operands
        args, kwargs = node.arguments(given)
        begin = time.perf_counter()
        made = function(*args, **kwargs)
        forward.append(time.perf_counter() - begin)
        results = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor) and t.requires_grad]
        grads = [torch.ones_like(t) for t in results]
        begin = time.perf_counter()
        if results and wanted:
            torch.autograd.grad(results, wanted, grads, allow_unused=True)
        backward.append(time.perf_counter() - begin)
    return min(forward[1:]), min(backward[1:])
