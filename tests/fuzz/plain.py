"""Plain Python among other things."""

from __future__ import annotations

from typing import Any

__all__ = ["plain"]


def plain(value: Any) -> tuple[Any] | None:
    """A copy of what is made of numbers, strings, lists, tuples and dicts alone, in a tuple; else None."""
    if value is None or type(value) in (bool, int, float, str):
        return (value,)
    if type(value) in (list, tuple):
        inner = [plain(each) for each in value]
        return None if None in inner else ([each[0] for each in inner if each is not None],)
    if type(value) is dict:
        named = {str(key): plain(each) for key, each in value.items()}
        if None in named.values():
            return None
        return ({key: each[0] for key, each in named.items() if each is not None},)
    return None
