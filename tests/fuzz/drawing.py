"""Nets at random: a spine of ordinary layers, and among them a few blocks that are about something."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fuzz.blocks import images, known, norms, pictures, structure, tokens
from fuzz.grammar import BLOCKS, IMAGES, Shape, build_block, tag_of
from fuzz.nets import RETURNS, TAKES

__all__ = ["draw_net", "is_outer", "paths"]

_ORDINARY = {
    name
    for name, cls in BLOCKS.items()
    if cls.__module__ in {m.__name__ for m in (images, known, norms, pictures, structure, tokens)}
}
_RARE = {"transposed", "adaptive_pool", "upsample", "pixel_shuffle", "windows", "quantised"}
_KEEPS = {"conv", "transposed", "pool", "dense", "bottleneck"}
"""those that keep the shape when asked to"""
_OUTER = {
    tag_of(cls)
    for cls in vars(structure).values()
    if isinstance(cls, type) and issubclass(cls, structure._Outer) and cls is not structure._Outer
}


def draw_net(rng: random.Random, kind: str) -> dict[str, Any]:
    """The specification of a net for inputs of a kind."""
    channels = rng.choice([2, 3]) if kind in IMAGES else rng.choice([3, 4])
    shape = Shape("tokens" if kind == "ids" else kind, channels)
    blocks: list[Any] = []
    features = rng.choices([0, 1, 2, 3], [10, 45, 30, 15])[0]
    count = features + rng.choice([1, 2, 3, 4])
    chosen = set(rng.sample(range(count), features))
    to_vectors = kind in ("image", "volume") and rng.random() < 0.5
    turn = rng.randrange(1, count + 1) if to_vectors or rng.random() < 0.4 else -1
    for number in range(count):
        if number == turn:
            shape = _turned(rng, blocks, shape)
        drawn = _drawn(rng, shape, number in chosen, depth=0)
        shape = build_block(drawn, shape).out
        blocks.append(drawn)
    if turn == count:
        shape = _turned(rng, blocks, shape)
    net: dict[str, Any] = {"input": {"kind": kind, "channels": channels}, "blocks": blocks}
    if rng.random() < 0.8:
        net["head"] = {"out": rng.choice([2, 3, 4])}
        if kind == "ids" and shape.kind == "tokens" and shape.channels == channels:
            net["head"]["tied"] = rng.random() < 0.6
    net["takes"] = "one" if rng.random() < 0.72 else rng.choice(TAKES)
    if kind == "ids" and net["takes"] in ("masked", "listed"):
        net["takes"] = "one"
    net["returns"] = "tensor" if rng.random() < 0.72 else rng.choice(RETURNS)
    return net


def _turned(rng: random.Random, blocks: list[Any], shape: Shape) -> Shape:
    """Go over to vectors or tokens, if that is possible."""
    fit = {"image": ["flatten", "flatten", "patches"], "volume": ["flatten"], "tokens": ["summary"]}
    if shape.kind not in fit:
        return shape
    name = rng.choice(fit[shape.kind])
    drawn = [name, BLOCKS[name].draw(rng, shape, False)]
    blocks.append(drawn)
    return build_block(drawn, shape).out


def _drawn(rng: random.Random, shape: Shape, feature: bool, depth: int, same: bool = False) -> Any:
    fit = [
        name
        for name, cls in sorted(BLOCKS.items())
        if shape.kind in cls.kinds
        and cls.often > 0
        and (name in _ORDINARY) != feature
        and (cls.same or name in _KEEPS or not same)
        and not (depth and name in _OUTER and depth > 1)
    ]
    weights = [BLOCKS[name].often * (0.6 if name in _RARE else 1.0) for name in fit]
    name = rng.choices(fit, weights)[0]
    args = BLOCKS[name].draw(rng, shape, same)
    if name in _OUTER:
        count = rng.choice([1, 2, 2, 3])
        inner_feature = rng.random() < 0.2
        args["inner"] = [
            _drawn(rng, shape, inner_feature and not i, depth + 1, same=True) for i in range(count)
        ]
    return [name, args]


def is_outer(name: str) -> bool:
    """Whether a block has others within."""
    return name in _OUTER


def paths(net: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every block of a net: its path among the modules, its tag, its arguments but for blocks within."""

    def walk(blocks: list[Any], prefix: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for number, (name, args) in enumerate(blocks):
            path = f"{prefix}.{number}"
            yield path, name, {key: value for key, value in args.items() if key != "inner"}
            yield from walk(args.get("inner", []), f"{path}.inner")

    yield from walk(net["blocks"], "blocks")
