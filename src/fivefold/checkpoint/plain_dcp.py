"""Checks directories that plain torch.distributed.checkpoint (DCP) has written, without torch.

What torch loads without a word, a flipped bit in a tensor, is found: every part of a file is a zip archive
whose records have checksums, which torch writes and does not read. (Of the archive's own tables some bits are
left to torch, which refuses them.)
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from fivefold.checkpoint.files import Window
from fivefold.checkpoint.manifest import METADATA
from fivefold.checkpoint.metadata import Contents, Location, contents_of
from fivefold.checkpoint.place import Place
from fivefold.checkpoint.store import Problem
from fivefold.errors import Damaged

__all__ = ["Checked", "is_plain_dcp", "read_contents", "verify_plain_dcp"]

_OF_ONE_RANK = re.compile(r"__[0-9]+\.metadata", re.ASCII)


@dataclass(frozen=True)
class Checked:
    """What a check has found."""

    problems: tuple[Problem, ...]
    parts: int
    """tensors, chunks of tensors and values"""
    unchecked: int
    """parts without checksums, of which only the length is known to be right"""


def is_plain_dcp(place: Place, folder: str = "") -> bool:
    """Whether DCP has written this directory."""
    return bool(_metadata_names(place, folder))


def _metadata_names(place: Place, folder: str) -> list[str]:
    names = place.list(folder)
    return [METADATA] if METADATA in names else list(filter(_OF_ONE_RANK.fullmatch, names))


def read_contents(place: Place, folder: str = "") -> Contents:
    """What the directory consists of. Raises `Damaged`, or `FileNotFoundError` without metadata."""
    names = _metadata_names(place, folder)
    if not names:
        raise FileNotFoundError(f"{place.where(folder)} has no {METADATA}: DCP did not write it")
    each = [contents_of(place.read(_in(folder, n)), place.where(_in(folder, n))) for n in names]
    entries = {entry.name: entry for contents in each for entry in contents.entries}
    parts = tuple(part for contents in each for part in contents.parts)
    return Contents(tuple(entries.values()), parts)


def verify_plain_dcp(place: Place, folder: str = "", *, deep: bool = True) -> Checked:
    """What is wrong with a DCP directory: its metadata, and the files that the metadata names.

    `deep` reads all bytes; else only the files' lengths are looked at. Raises `OSError` where the directory
    itself cannot be read.
    """
    try:
        contents = read_contents(place, folder)
    except Damaged as problem:
        return Checked((Problem(METADATA, "unreadable", str(problem)),), 0, 0)
    files: dict[str, list[Location]] = {}
    for part in contents.parts:
        files.setdefault(part.file, []).append(part)
    problems: list[Problem] = []
    unchecked = 0
    for name in sorted(files):
        found, without = _verify_file(place, folder, name, files[name], deep)
        problems += found
        unchecked += without
    return Checked(tuple(problems), len(contents.parts), unchecked)


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _verify_file(
    place: Place, folder: str, name: str, parts: Sequence[Location], deep: bool
) -> tuple[list[Problem], int]:
    needed = max(part.start + part.length for part in parts)
    try:
        length = place.size(_in(folder, name))
        if length < needed:
            return [Problem(name, "length", f"{length} bytes, {needed} are needed")], 0
        if overlapping := _overlapping(parts):
            return [Problem(METADATA, "unreadable", f"{name}: {overlapping}")], 0
        if not deep:
            return [], len(parts)
        with place.open(_in(folder, name)) as file:
            states = [(part, _state(file, part)) for part in parts]
    except FileNotFoundError:
        return [Problem(name, "missing", "it is not there")], 0
    except OSError as error:
        return [Problem(name, "unreadable", f"it cannot be read: {error}")], 0
    wrong = [
        Problem(name, "digest", f"{part.name:.200}: {state}") for part, state in states if state
    ]
    return wrong, sum(state is None for _, state in states)


def _overlapping(parts: Sequence[Location]) -> str:
    """Two parts with the same bytes, which DCP never writes: reading them could take any time."""
    ordered = sorted(parts, key=lambda part: part.start)
    for part, following in pairwise(ordered):
        if part.start + part.length > following.start:
            return f"{part.name:.80} and {following.name:.80} are said to share bytes"
    return ""


def _state(file: BinaryIO, part: Location) -> str | None:
    """What is wrong with a part; empty if nothing is, None if that cannot be told."""
    if part.transformed:
        return None

    def fill(at: int, buffer: memoryview) -> int:
        file.seek(part.start + at)
        data = file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    window = io.BufferedReader(Window(fill, part.length), 1 << 20)
    try:
        with zipfile.ZipFile(window) as archive:
            records = archive.infolist()
            if not records or any(
                r.external_attr or r.internal_attr or r.volume or r.compress_type for r in records
            ):
                return "its table of records is not one of torch.save"
            # Else a small file may hold the same bytes any number of times.
            if sum(record.file_size for record in records) > part.length:
                return "its records are larger than itself"
            if not any(record.CRC for record in records):
                return None  # torch.serialization.set_crc32_options(False)
            broken = archive.testzip()
    except OSError:
        raise
    except Exception as problem:  # noqa: BLE001 - a damaged archive raises anything
        return f"no intact archive of torch.save: {problem!r}"
    return f"the checksum of {broken} does not match" if broken else ""
