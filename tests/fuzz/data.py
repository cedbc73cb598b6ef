"""Batches of a case: every process makes the whole batch, from the seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.nets import VOCABULARY

__all__ = ["batch", "inputs_of", "target_shape"]


def batch(case: dict[str, Any], number: int) -> tuple[Any, Any]:
    """Inputs and targets of batch `number`; a tuple is positional, a dict keyword arguments."""
    told = case["batches"][number]
    draw = torch.Generator().manual_seed(case["seed"] * 1009 + number)
    inputs = inputs_of(case, number, draw)
    return inputs, _target(told["target"], draw)


def inputs_of(case: dict[str, Any], number: int, draw: torch.Generator | None = None) -> Any:
    """The inputs alone."""
    told, net = case["batches"][number], case["net"]
    draw = draw or torch.Generator().manual_seed(case["seed"] * 1009 + number)
    kind, channels = net["input"]["kind"], net["input"]["channels"]
    rows, size = told["rows"], told["size"]

    def tensor() -> Tensor:
        if kind == "ids":
            return torch.randint(VOCABULARY, (rows, *size), generator=draw)
        shape = (rows, *size, channels) if kind == "tokens" else (rows, channels, *size)
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(torch.get_default_dtype())

    return _arranged(net.get("takes", "one"), tensor, told, rows, draw)


def _arranged(takes: str, tensor: Any, told: dict[str, Any], rows: int, draw: Any) -> Any:
    if takes == "pair":
        return tensor(), tensor()
    if takes == "keywords":
        return {"x": tensor(), "z": tensor()}
    if takes == "nested":
        return {"batch": {"x": tensor(), "more": [tensor()]}}
    if takes == "mixed":
        extras = {
            "scale": 0.5,
            "flag": False,
            "mode": "none",
            "extra": None,
            **told.get("extras", {}),
        }
        return {"x": tensor(), **extras}
    if takes == "bag":
        made = {"a": tensor(), "b": tensor(), "c": tensor()}
        names = told.get("order", ["a", "b", "c"])
        return {name: made[name] for name in names}
    if takes == "masked":
        return tensor(), torch.rand(rows, generator=draw)
    if takes == "listed":
        return tensor(), torch.rand(rows, generator=draw).tolist()
    return tensor()


def _target(told: dict[str, Any], draw: torch.Generator) -> Tensor:
    kind, shape, dtype = told["kind"], told["shape"], torch.get_default_dtype()
    if kind in ("classes", "tokens"):
        return torch.randint(told["classes"], shape, generator=draw)
    if kind == "binary":
        return torch.randint(2, shape, generator=draw).to(dtype)
    if kind == "signs":
        return torch.randint(2, shape, generator=draw).to(dtype) * 2 - 1
    if kind == "positive":
        return torch.randint(4, shape, generator=draw).to(dtype)
    drawn = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    return drawn.softmax(1) if kind == "shares" else drawn


def target_shape(kind: str, output: Tensor) -> dict[str, Any]:
    """What a target looks like that goes with an output. Raises `ValueError` if none does."""
    shape = list(output.shape)
    if kind == "classes":
        if len(shape) < 2 or shape[1] < 2:
            raise ValueError(f"no classes in an output of shape {shape}")
        return {"kind": kind, "shape": [shape[0], *shape[2:]], "classes": shape[1]}
    if kind == "tokens":
        if len(shape) != 3 or shape[2] < 2:
            raise ValueError(f"no tokens in an output of shape {shape}")
        return {"kind": kind, "shape": shape[:2], "classes": shape[2]}
    return {"kind": kind, "shape": shape}
