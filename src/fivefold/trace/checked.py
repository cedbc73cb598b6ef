"""What a trace says in words, of the kinds that readers rely on: a damaged file says anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["checked", "checked_stacks", "read_json"]

_MOST_RANKS = 1 << 20
_INTEGERS = (
    "local_rank", "local_size", "node", "pid", "threads", "monotonic_ns", "wall_ns", "clock_offset_ns",
    "clock_error_ns", "at_ns", "step", "index",
)  # fmt: skip
_TEXTS = (
    "host",
    "began",
    "engine",
    "backend",
    "device",
    "started",
    "kind",
    "text",
    "level",
    "name",
)
_KINDS: dict[str, type[Any]] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(("versions", "environment", "plan", "placement"), dict),
    **dict.fromkeys(("calibration", "links"), list),
}


def read_json(text: str) -> Any:
    """What JSON tells, nan and infinity as Python writes them included. Raises `ValueError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(told: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of meta, or of a note, that are what they should be; and the names of the others."""
    wrong = [name for name, value in told.items() if value is not None and not _fits(name, value)]
    return {name: value for name, value in told.items() if name not in wrong}, wrong


def _fits(name: str, value: object) -> bool:
    if name in ("rank", "size"):
        return _is_count(value) and cast(int, value) < _MOST_RANKS
    if name in _INTEGERS:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    if isinstance(value, float) and not math.isfinite(value):
        return name == "value"  # a loss may be nan
    if name in ("seconds", "bytes"):
        return isinstance(value, int | float)
    if name in ("cores", "ranks"):
        return isinstance(value, list) and all(map(_is_count, cast("list[object]", value)))
    if name in ("layout", "coordinates"):
        return isinstance(value, dict) and all(
            map(_is_count, cast("dict[str, object]", value).values())
        )
    return name not in _KINDS or isinstance(value, _KINDS[name])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def checked_stacks(told: Mapping[str, Any]) -> tuple[dict[str, list[tuple[str, int]]], bool]:
    """By phase: places and how often; and whether that was all that was told."""
    found: dict[str, list[tuple[str, int]]] = {}
    whole = True
    for phase, places in told.items():
        found[phase] = []
        for place in cast("list[Any]", places) if isinstance(places, list) else [None]:
            match place:
                case [str() as where, int() as count] if _is_count(count):
                    found[phase].append((where, count))
                case _:
                    whole = False
    return found, whole
