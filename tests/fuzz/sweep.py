"""Every feature alone, under one layout of each kind: what is exact, what refused, what wrong.

A block stands between two plain layers; losses, ways to call a net and ways to return have a plain net. What
may happen to a block between steps happens before the second step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fuzz.cases import Case, complete
from fuzz.drawing import is_outer
from fuzz.events import ANYTIME
from fuzz.grammar import BLOCKS, Block, Shape
from fuzz.losses import LOSSES, TARGETS
from fuzz.nets import RETURNS, TAKES

__all__ = ["LAYOUTS", "sweep"]

LAYOUTS: tuple[dict[str, int], ...] = ({"data": 2}, {"pipe": 2}, {"height": 2})
_KINDS = ("image", "tokens", "vector", "volume")
_CHANNELS = 4
_DRAWS = 60


def sweep(layouts: tuple[dict[str, int], ...] = LAYOUTS) -> Iterator[Case]:
    """All cases; those that are not valid in one process are left out, as far as shapes tell."""
    for layout in layouts:
        for told in _told("height" in layout or "width" in layout):
            case = {
                "seed": 5,
                "layout": layout,
                "plan": {},
                "backend": "gloo",
                "example": False,
                "loss": {"name": "mse"},
                "steps": [{"batch": 0}, {"batch": 0}],
                **told,
            }
            try:
                yield complete(case)
            except Exception:  # noqa: BLE001 - not valid, for whatever reason
                continue


def _told(images: bool) -> Iterator[dict[str, Any]]:
    for name, cls in sorted(BLOCKS.items()):
        kinds = [kind for kind in _KINDS if kind in cls.kinds and not (images and kind == "vector")]
        if not kinds:
            continue
        kind = kinds[0]
        for args in _arguments(name, cls, kind):
            yield _plain(kind, [[name, args]])
            for event in cls.events(random.Random(0), args):
                told = _plain(kind, [[name, args]])
                yield {**told, "steps": [{"batch": 0}, _with({"at": "blocks.1", **event})]}
    for event in ANYTIME:
        yield {**_plain("image", []), "steps": [{"batch": 0}, _with(dict(event))]}
    for key, values in (("takes", TAKES), ("returns", RETURNS)):
        for value in values:
            told = _plain("image", [])
            told["net"][key] = value
            yield told
    for name in LOSSES:
        kind = "tokens" if TARGETS[name] == "tokens" else "image"
        block = [["balanced", {}]] if name == "auxiliary" else []
        yield {**_plain(kind, block), "loss": {"name": name}}


def _with(event: dict[str, Any]) -> dict[str, Any]:
    return {"batch": 0, "events": [event]}


def _arguments(name: str, cls: type[Block], kind: str) -> list[dict[str, Any]]:
    """Arguments that differ in what is no number: drawn often enough to see all."""
    rng, found = random.Random(1), dict[str, dict[str, Any]]()
    for _ in range(_DRAWS):
        args = cls.draw(rng, Shape(kind, _CHANNELS), True)
        words = {k: v for k, v in args.items() if isinstance(v, str | bool)}
        if is_outer(name):
            args["inner"] = [
                _layer(kind),
                ["batch_norm", {}] if kind == "image" else ["layer_norm", {}],
            ]
        found.setdefault(str(words), args)
    return list(found.values())


def _layer(kind: str) -> list[Any]:
    if kind in ("image", "volume"):
        return ["conv", {"out": _CHANNELS, "k": 3, "padding": 1}]
    return ["dense", {"out": _CHANNELS}]


def _plain(kind: str, blocks: list[Any]) -> dict[str, Any]:
    size = {"image": [9, 8], "tokens": [4], "vector": [], "volume": [5, 6, 5]}[kind]
    net = {
        "input": {"kind": kind, "channels": _CHANNELS},
        "blocks": [_layer(kind), *blocks],
        "head": {"out": 3},
    }
    return {"net": net, "batches": [{"rows": 6, "size": size}]}
