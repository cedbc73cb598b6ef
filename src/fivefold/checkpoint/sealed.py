"""JSON files that know their own digest: a flipped bit, a torn end or an edit by hand is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import xxhash

from fivefold.errors import Damaged, Foreign

__all__ = ["Fields", "count", "seal", "unseal"]


def seal(kind: str, version: int, body: object) -> str:
    """`body` as JSON text, under the name `kind`, with the version of its format and a digest."""
    return _dumped({"digest": _digest(kind, version, body), "format": version, kind: body})


def unseal(kind: str, version: int, text: str | bytes, where: Path | str) -> Fields:
    """What `seal` was given; `where` is named in errors.

    Raises:
        Damaged: it is not what was written.
        Foreign: it is intact, but its format is not `version`.
    """
    try:
        text = text.decode("ascii") if isinstance(text, bytes) else text
        whole = json.loads(text)
        form, body, digest = whole["format"], whole[kind], whole["digest"]
        # Compared as text: a flipped bit may well turn one kind of white space into another.
        intact = text == _dumped(whole) and digest == _digest(kind, form, body)
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise Damaged(f"the {kind}", where, repr(problem)) from None
    if not intact:
        raise Damaged(f"the {kind}", where, "its digest does not match")
    if form != version:
        raise Foreign(
            f"{where} has format {form!r}; this version of Fivefold reads format {version}: use the "
            "version that wrote the checkpoint, or a newer one"
        )
    try:
        return Fields(body)
    except TypeError as problem:
        raise Damaged(f"the {kind}", where, str(problem)) from None


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


def _dumped(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"


def _digest(kind: str, version: object, body: object) -> str:
    return xxhash.xxh3_128_hexdigest(_dumped([kind, version, body]).encode("ascii"))
