"""A trace file as arrays: made by the rank that writes it, mapped or read by everybody else."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UsageError
from fivefold.trace.schema import HEADER_BYTES, MAGIC, SECTIONS, TEXT_BYTES, VERSION

__all__ = ["SUFFIX", "TraceError", "TraceFile", "name_of"]

SUFFIX = ".trace"
_PAGE = 4096
_NUMBER = re.compile("[<|]?[iuf][1248]")


class TraceError(UsageError):
    """A file is no trace, is damaged, or of a newer version."""


def name_of(rank: int) -> str:
    """File name of a rank's trace: rank-00003.trace."""
    return f"rank-{rank:05d}{SUFFIX}"


class TraceFile:
    """The sections of one file: tables as structured arrays, texts as bytes."""

    def __init__(
        self, buffer: mmap.mmap | bytes, sections: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.buffer = buffer
        self.sections = sections
        self.live: NDArray[np.void] = self._table("live")
        self.events: NDArray[np.void] = self._table("events")
        self.sums: NDArray[np.void] = self._table("sums")
        self.windows: NDArray[np.void] = self._table("windows")

    @classmethod
    def create(cls, path: Path, rows: Mapping[str, int] | None = None) -> TraceFile:
        """Make a file, complete and empty. It appears whole; pages not written to take no space on disk.

        `rows` replaces how many rows tables have. Raises `OSError`.
        """
        sections = _laid_out({name: (rows or {}).get(name, n) for name, (_, n) in SECTIONS.items()})
        size = max(s["offset"] + s["bytes"] for s in sections.values())
        told = json.dumps(sections).encode()
        head = MAGIC + VERSION.to_bytes(4, "little") + len(told).to_bytes(4, "little") + told
        assert len(head) <= HEADER_BYTES
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with partial.open("w+b") as file:
                file.truncate(size)
                file.write(head)
                file.flush()
                buffer = mmap.mmap(file.fileno(), size)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return cls(buffer, sections)

    @classmethod
    def open(cls, path: Path) -> TraceFile:
        """Map a file to read it, whoever still writes. Raises `TraceError`."""
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise TraceError(f"{path} is empty: its rank ended before it recorded anything")
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise TraceError(f"cannot read the trace {path}: {problem.strerror}") from None
        return cls(buffer, _sections_of(buffer, path))

    def text(self, name: str) -> str:
        """What is in use of a section of text."""
        section = self.sections[name]
        length = min(int(self.live[0][f"{name}_bytes"]), section["bytes"])
        begin = section["offset"]
        return bytes(self.buffer[begin : begin + length]).decode(errors="replace")

    def _table(self, name: str) -> NDArray[np.void]:
        section = self.sections[name]
        return np.frombuffer(
            self.buffer, _dtype(section["fields"]), count=section["items"], offset=section["offset"]
        )


def _laid_out(rows: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    offset = HEADER_BYTES
    tables = {name: SECTIONS[name][0].itemsize * n for name, n in rows.items()}
    for name, size in {**tables, **TEXT_BYTES}.items():
        found[name] = {"offset": offset, "bytes": size}
        if name in rows:
            found[name] |= {"items": rows[name], "fields": _fields(SECTIONS[name][0].descr)}
        offset += -(-size // _PAGE) * _PAGE
    return found


def _sections_of(buffer: mmap.mmap, path: Path) -> dict[str, dict[str, Any]]:
    """The header, checked: every section has to lie within the file."""
    if buffer[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{path} is no trace of Fivefold")
    version = int.from_bytes(buffer[16:20], "little")
    if version > VERSION:
        raise TraceError(
            f"{path} has version {version} of the format, this Fivefold reads up to {VERSION}: "
            "use a newer one"
        )
    length = int.from_bytes(buffer[20:24], "little")
    try:
        sections = _parsed(buffer[24 : 24 + length])
        for name in (*SECTIONS, *TEXT_BYTES):
            section = sections[name]
            size = section["bytes"]
            if name in SECTIONS:
                size = _dtype(section["fields"]).itemsize * section["items"]
                _check_fields(name, _dtype(section["fields"]))
            if section["offset"] < HEADER_BYTES or section["offset"] + size > len(buffer):
                raise TraceError(
                    f"{path} is cut off: section {name} ends at byte {section['offset'] + size:,}, "
                    f"the file has {len(buffer):,}; copy it again"
                )
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise TraceError(f"{path} is damaged: its header says no sections ({problem!r})") from None
    return sections


def _check_fields(name: str, found: np.dtype[np.void]) -> None:
    """Raise `KeyError` or `TypeError` unless a table has what readers ask of it; it may have more."""
    known = SECTIONS[name][0].fields or {}
    for field, (kind, *_) in known.items():
        if (found.fields or {})[field][0] != kind:
            raise TypeError(f"{name}.{field} is no {kind}")


@lru_cache(4)
def _parsed(told: bytes) -> dict[str, dict[str, Any]]:
    """Sections as a header says them; the files of a run all say the same."""
    sections = json.loads(told)
    for section in sections.values():
        if "fields" in section:
            section["fields"] = _fields(section["fields"])
    return sections


def _fields(told: list[Any]) -> tuple[Any, ...]:
    for _, kind, *_ in told:
        # numpy knows more names, and warns of some
        if not _NUMBER.fullmatch(kind):
            raise ValueError(f"{kind!r} is no number")
    return tuple(tuple(tuple(p) if isinstance(p, list) else p for p in field) for field in told)


@lru_cache(64)
def _dtype(fields: tuple[Any, ...]) -> np.dtype[np.void]:
    return np.dtype(list(fields))
