"""The page that describes trace files lists what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fivefold.trace.schema import (
    DTYPES,
    HEADER_BYTES,
    KINDS,
    PHASES,
    SECTIONS,
    TAGS,
    TEXT_BYTES,
    VERSION,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "trace-file.md").read_text()


def _told(dtype: np.dtype) -> str:
    word = dtype.base.str.lstrip("<|")
    return f"{dtype.shape[0]} x {word}" if dtype.shape else word


@pytest.mark.parametrize("name", SECTIONS)
def test_every_field_is_listed_with_its_type(name: str) -> None:
    section = re.split(r"^###? ", PAGE.partition(f"### `{name}`")[2], flags=re.MULTILINE)[0]
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    dtype, rows = SECTIONS[name]
    assert listed == [(field, _told(dtype[field])) for field in dtype.names or ()]
    heading = PAGE.partition(f"### `{name}`")[2].splitlines()[0]
    assert f"{rows:,}" in heading or name == "live"


@pytest.mark.parametrize(
    ("field", "names"), [("kind", KINDS), ("phase", PHASES), ("tag", TAGS), ("dtype", DTYPES)]
)
def test_numbers_are_listed(field: str, names: tuple[str, ...]) -> None:
    numbers = PAGE.partition("## Numbers")[2]
    told = re.search(rf"^\| {field} \| (.*) \|$", numbers, re.MULTILINE)
    assert told
    assert told[1] == ", ".join(f"{i} {name or 'none'}" for i, name in enumerate(names))


def test_version_and_texts_are_told() -> None:
    assert f"version {VERSION}." in PAGE
    assert re.search(rf"^{HEADER_BYTES} +the sections", PAGE, re.MULTILINE)
    for name in TEXT_BYTES:
        assert re.search(rf"^`{name}` (is|has)", PAGE, re.MULTILINE), name
