"""Lengths of time, as people write them."""

from __future__ import annotations

import re

from fivefold.errors import UsageError

__all__ = ["seconds_of"]

_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(option: str, text: str, examples: str = "0.5s, 10min, 4h or 7d") -> float:
    """`10min` as seconds. Raises `UsageError`.

    >>> seconds_of("--save", "10min"), seconds_of("--save", "2.5s"), seconds_of("--mtbf", "1d")
    (600.0, 2.5, 86400.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?(ms|s|m|min|h|d|)", text.strip(), re.ASCII)
    if found is None:
        raise UsageError(f"{option} {text!r} is no time; write {examples}")
    return float(found[1]) * _UNITS[found[2]]
