"""What `parallelize` was given, in lines that are the same on all ranks that were given the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.mesh.agreement import Line
from fivefold.parallel.graph.fingerprint import in_words
from fivefold.parallel.trees import flatten

__all__ = ["given"]

_SECTIONS = ("parallel", "tiles", "pipeline", "memory", "numerics")
"""of the plan: the layout fits the mesh, and no other decides what a step computes"""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def given(
    net: nn.Module, mesh: Mesh, example: object, loss: Callable[..., Any] | None
) -> list[Line]:
    """The plan, the example where the layout needs one, the loss, and what the net consists of."""
    lines = [
        (str(value), f"{section}.{key} of the plan")
        for section in _SECTIONS
        for key, value in asdict(getattr(mesh.plan, section)).items()
    ]
    if mesh.layout.pipe * mesh.layout.tiles > 1:
        flat, structure = flatten(example)
        lines.append((_ADDRESS.sub("", str(structure.spec)), "the example"))
        lines += [(_described(leaf), "a tensor of the example") for leaf in flat]
    return [*lines, *_of_loss(loss, "the loss", net), *_of_net(net)]


def _described(leaf: object) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else in_words(leaf)


def _of_loss(loss: Any, name: str, net: nn.Module) -> Iterator[Line]:
    """What it is, and its numbers: class weights, say; those of the net are made equal anyhow."""
    of_net = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
    if isinstance(loss, functools.partial):
        yield in_words((loss.args, loss.keywords)), f"an argument of {name}"
        loss = loss.func
    yield in_words(loss), name
    modules = loss.named_modules() if isinstance(loss, nn.Module) else [("", loss)]
    for path, one in modules:
        held: dict[str, object] = dict(getattr(one, "__dict__", {}))
        if isinstance(one, nn.Module):
            held |= dict(one.named_parameters(recurse=False))
            held |= dict(one.named_buffers(recurse=False))
        for key, value in held.items():
            plain = isinstance(value, (Tensor, str, int, float, type(None)))
            if plain and not key.startswith("_") and id(value) not in of_net:
                yield in_words(value), f"{'.'.join(filter(None, (path, key)))} of {name}"


def _of_net(net: nn.Module) -> Iterator[Line]:
    for path, module in net.named_modules():
        kind = type(module)
        # What others say of themselves may be of the rank: its number, its device.
        told = module.extra_repr() if kind.__module__.startswith("torch.nn.") else ""
        mode = "" if module.training else " in evaluation mode"
        yield f"{path or 'itself'}, {kind.__qualname__}({told}){mode}", "a module of the net"
    for name, parameter in net.named_parameters():
        trained = "" if parameter.requires_grad else " without gradient"
        yield f"{name}, {_described(parameter)}{trained}", "a parameter of the net"
    for name, buffer in net.named_buffers():
        yield f"{name}, {_described(buffer)}", "a buffer of the net"
