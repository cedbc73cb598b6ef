"""What Python knows of the C core by position stands in its header in the same order."""

from __future__ import annotations

import re
from pathlib import Path

from fivefold import sections
from fivefold.arena import native
from fivefold.comm import core

HEADER = (Path(__file__).resolve().parents[3] / "native" / "fivefold.h").read_text()


def members(name: str) -> list[str]:
    """Of an enumeration, without what counts them."""
    found = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert found is not None
    body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    names = [word.strip().removeprefix("FF_") for word in body.split(",")]
    return [name for name in names if name not in {"KINDS", "DTYPES", "REDUCTIONS"}]


def test_statuses() -> None:
    _, *told = members("ff_status")
    assert [getattr(core, f"_{name}") for name in told] == [*range(1, len(told) + 1)]


def test_operations() -> None:
    assert [name.replace("_", "") for name in native.KINDS] == [
        name.lower().replace("_", "") for name in members("ff_kind")
    ]


def test_element_types() -> None:
    def short(name: str) -> str:
        letter = {"uint": "U", "int": "I", "float": "F", "bfloat": "BF", "bool": "BOOL"}
        kind = name.rstrip("0123456789")
        return letter[kind] + name.removeprefix(kind)

    assert [short(name) for name in native.DTYPES] == members("ff_dtype")


def test_reductions() -> None:
    assert [name.upper() for name in native.REDUCTIONS] == members("ff_reduction")


def test_lanes() -> None:
    assert members("ff_lane").index("MESSAGES") == native.MESSAGES


def test_limits() -> None:
    told = {
        "FF_ABI": native.ABI,
        "FF_MAX_LOCAL": native.MAX_LOCAL,
        "FF_MAX_RANKS": native.MAX_RANKS,
        "FF_MISSING": native.MISSING,
        "FF_MAX_RAILS": sections.MOST_RAILS,
    }
    for name, value in told.items():
        found = re.search(rf"#define {name} (\d+)", HEADER)
        assert found is not None
        assert int(found[1]) == value
