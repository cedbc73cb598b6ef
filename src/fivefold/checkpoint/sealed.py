"""JSON files that know their own digest: a flipped bit, a torn end or an edit by hand is noticed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import xxhash

from fivefold.errors import Damaged, Foreign

__all__ = ["Fields", "count", "seal", "unseal"]


def seal(kind: str, version: int, body: object) -> str:
    """`body` as JSON text, under the name `kind`, with the version of its format and a digest.

    {"digest": "3f...",     of everything after this line
    "format": 1,
    "manifest": {
    "epoch": 1,
    ...
    }}
    """
    rest = f'"format": {version},\n"{kind}": {_lines(body)}}}\n'
    return _head(rest) + rest


def unseal(kind: str, version: int, text: str | bytes, where: Path | str) -> Fields:
    """What `seal` was given; `where` is named in errors.

    Raises:
        Damaged: it is not what was written.
        Foreign: it is intact, but its format is not `version`.
    """
    try:
        text = text.decode("ascii") if isinstance(text, bytes) else text
        head, newline, rest = text.partition("\n")
        if head + newline != _head(rest):
            raise Damaged(f"the {kind}", where, "its digest does not match")
        whole = Fields(json.loads(text))
        form = whole.count("format")
        if form == version:
            return whole.object(kind)
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise Damaged(f"the {kind}", where, repr(problem)) from None
    raise Foreign(
        f"{where} has format {form!r}; this version of Fivefold reads format {version}: use the "
        "version that wrote the checkpoint, or a newer one"
    )


class Fields:
    """The fields of a JSON object, each asked for with its type. All raise `KeyError` or `TypeError`."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no object")
        self._values = cast(dict[str, Any], value)

    def text(self, name: str) -> str:
        """A string."""
        value = self._values[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r:.40}")
        return value

    def count(self, name: str) -> int:
        """A whole number, not negative."""
        return count(self._values[name])

    def number(self, name: str) -> float:
        """A number, finite and not negative."""
        value = self._values[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise TypeError(f"{name} is {value!r:.40}")
        return float(value)

    def optional_count(self, name: str) -> int | None:
        """The same, or None."""
        return None if self._values[name] is None else self.count(name)

    def array(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._values[name]
        if not isinstance(value, list):
            raise TypeError(f"{name} is {value!r:.40}")
        return cast(list[Any], value)

    def optional_counts(self, name: str, length: int) -> list[int] | None:
        """A list of `length` whole numbers, or None."""
        if self._values[name] is None:
            return None
        values = list(map(count, self.array(name)))
        if len(values) != length:
            raise TypeError(f"{name} is {values!r:.40}")
        return values

    def object(self, name: str) -> Fields:
        """An object."""
        return Fields(self._values[name])

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(value) for value in self.array(name)]

    def counts(self) -> dict[str, int]:
        """All fields, each a whole number."""
        return {name: count(value) for name, value in self._values.items()}

    def texts(self) -> dict[str, str]:
        """All fields, each a string."""
        return {name: self.text(name) for name in self._values}


def count(value: object) -> int:
    """`value`, if it is a whole number and not negative; else `TypeError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r:.40} is no count")
    return value


def _lines(body: object) -> str:
    """A field on each line: for people, and as quick as JSON on one line."""
    if not isinstance(body, Mapping):
        return json.dumps(body)
    fields = cast(Mapping[str, object], body)
    lines = (
        f"{json.dumps(name)}: {json.dumps(fields[name], sort_keys=True, allow_nan=False)}"
        for name in sorted(fields)
    )
    return "{\n" + ",\n".join(lines) + "\n}"


def _head(rest: str) -> str:
    return f'{{"digest": "{xxhash.xxh3_128_hexdigest(rest.encode("ascii"))}",\n'
