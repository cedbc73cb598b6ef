"""What files tell, made fit for a terminal."""

from __future__ import annotations

import unicodedata
from typing import Any, TypeVar, cast

__all__ = ["printable"]

_T = TypeVar("_T")
_KEPT = "\n\t"
_HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""categories of Unicode: controls, marks that turn the direction of text, halves of characters, line ends"""


def printable(value: _T) -> _T:
    r"""The same with what a terminal would obey written out, in every text of it.

    >>> printable({"name": "a\x1b[2Jb", "count": 3})
    {'name': 'a\\x1b[2Jb', 'count': 3}
    """
    made: Any = value
    if isinstance(value, str):
        made = "".join(map(_shown, value))
    elif isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        made = {printable(key): printable(member) for key, member in pairs}
    elif isinstance(value, list):
        made = [printable(member) for member in cast("list[Any]", value)]
    elif isinstance(value, tuple):
        made = tuple(printable(member) for member in cast("tuple[Any, ...]", value))
    return made


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HARMFUL:
        return character
    return character.encode("unicode_escape").decode()
