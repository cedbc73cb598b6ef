"""Nets from their specification: plain torch, built alike by every process of a case.

{"input": {"kind": "image", "channels": 2}, "takes": "one", "blocks": [["conv", {...}], ...],
 "head": {"out": 4, "tied": false}, "returns": "tensor"}
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fuzz.blocks
from fuzz.grammar import GLOBALS, Shape, build_chain, layer
from fuzz.plain import plain

__all__ = [
    "RETURNS",
    "TAKES",
    "Net",
    "Returned",
    "Triple",
    "build",
    "by_rows",
    "main_output",
    "state",
]

VOCABULARY = 7
TAKES = ("one", "pair", "keywords", "mixed", "bag", "masked", "listed", "nested")
RETURNS = ("tensor", "tuple", "list", "dict", "dataclass", "named", "number", "deep")


@dataclasses.dataclass
class Returned:
    """What a net returns as a dataclass, in the manner of Hugging Face."""

    out: Tensor
    side: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()


class Triple(NamedTuple):
    out: Tensor
    side: Tensor
    nothing: None = None


class Net(nn.Module):
    """A chain of blocks with a head; `takes` and `returns` say how it is called and what it gives."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.takes, self.returns = told.get("takes", "one"), told.get("returns", "tensor")
        given = told["input"]
        shape = Shape(given["kind"], given["channels"])
        self.embedding = None
        if shape.kind == "ids":
            self.embedding = nn.Embedding(VOCABULARY, shape.channels)
            shape = Shape("tokens", shape.channels)
        blocks, shape = build_chain(told["blocks"], shape)
        self.blocks = nn.ModuleList(blocks)
        head = told.get("head")
        self.head: nn.Module | None = None
        if head and head.get("tied") and self.embedding is not None:
            self.head = nn.Linear(shape.channels, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
        elif head:
            self.head = layer(shape, head["out"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.received(*args, **kwargs)
        first = None
        for block in self.blocks:
            x = block(x)
            first = x if first is None else first
        side = (x if first is None else first).flatten(1).mean(1)
        if self.head is not None:
            x = self.head(x)
        return _returned(self.returns, x, side)

    def received(self, *args: Any, **kwargs: Any) -> Tensor:
        """One tensor of all that the net is given."""
        if self.takes == "pair":
            x, z = args
            return self.start(x) + 0.5 * self.start(z)
        if self.takes == "keywords":
            return self.start(kwargs["x"]) - 0.5 * self.start(kwargs["z"])
        if self.takes == "nested":
            batch = kwargs["batch"]
            return self.start(batch["x"]) - 0.5 * self.start(batch["more"][0])
        if self.takes == "mixed":
            return self.mixed(**kwargs)
        if self.takes == "bag":
            made = None
            for value in kwargs.values():  # in the order in which they are given
                y = self.start(value)
                made = y if made is None else (0.5 * made).tanh() + y
            return made
        if self.takes in ("masked", "listed"):
            x, share = args
            y = self.start(x)
            share = torch.tensor(share, dtype=y.dtype) if isinstance(share, list) else share
            return y * share.view(-1, *[1] * (y.dim() - 1))
        return self.start(args[0] if args else kwargs["x"])

    def mixed(
        self, x: Tensor, scale: float, flag: bool, mode: str, extra: float | None = None
    ) -> Tensor:
        """Tensors with a float, a bool, a string and None among them."""
        y = self.start(x) * scale
        y = y.tanh() if flag else y
        return (y.sin() if mode == "sin" else y) if extra is None else y + extra

    def start(self, x: Tensor) -> Tensor:
        return x if self.embedding is None else self.embedding(x)


def _returned(how: str, x: Tensor, side: Tensor) -> Any:
    if how == "tuple":
        return x, side
    if how == "list":
        return [x, side]
    if how == "dict":
        return {"out": x, "nothing": None, "side": side}
    if how == "dataclass":
        return Returned(x, side, (side * 2.0,))
    if how == "named":
        return Triple(x, side)
    if how == "number":
        return {"out": x, "scale": 0.5, "name": "main", "size": math.prod(x.shape[1:])}
    if how == "deep":
        return {"out": x, "more": [{"side": side}, (None, side + 1.0)]}
    return x


def main_output(returned: Any) -> Tensor:
    """The tensor that losses are about."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, dict):
        return returned["out"]
    return returned[0] if isinstance(returned, tuple | list) else returned.out


def build(told: dict[str, Any]) -> Net:
    """A net of its own: what is global to modules is made anew."""
    torch.use_deterministic_algorithms(False)
    GLOBALS.clear()
    GLOBALS.update(scale=0.9, cache={})
    fuzz.blocks.memories.forget()
    return Net(told)


def by_rows(told: dict[str, Any]) -> Net:
    """The same, whose regions of low precision round each sample alone."""
    net = build(told)
    for module in net.modules():
        if hasattr(module, "by_rows"):
            module.by_rows = True
    return net


def state(net: nn.Module, loss: Any) -> dict[str, Any]:
    """What is plain Python in the modules of a net and in its loss, by name."""
    found: dict[str, Any] = {}
    for path, module in net.named_modules():
        for name, value in module.__dict__.items():
            told = plain(value)
            if not name.startswith("_") and told is not None:
                found[f"{path}.{name}" if path else name] = told[0]
    for name, value in getattr(loss, "__dict__", {}).items():
        told = plain(value)
        if not name.startswith("_") and told is not None:
            found[f"loss:{name}"] = told[0]
    return found
