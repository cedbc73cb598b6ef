"""Traces that are damaged, in their bytes or in what they say: a report or a sentence, never a traceback."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import reports
from fivefold.errors import UsageError
from fivefold.introspect.document import document
from fivefold.introspect.page import html
from fivefold.introspect.run import TracedRun
from fivefold.introspect.text import show
from fivefold.trace.file import TraceError, TraceFile
from fivefold.trace.schema import LIVE

# Figures of nonsense become nan; the command leaves out what numpy says to that.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
_VALUES = (None, [], {}, "x", -1, 1e300, 10**30, True, [[]], {"a": 1}, "", 0, float("nan"))
_KINDS = ("checkpoint", "failure", "hang", "mismatch", "recovery", "warning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    return reports.busy(ranks=2, steps=30, late=1).write(folder)


def told(run: Path) -> bool:
    """Whether a report is made of it."""
    try:
        made = document(TracedRun.load(run))
    except UsageError:
        return False
    html(made)
    show(made, Console(file=io.StringIO(), width=160))
    return True


def damaged(draw: random.Random, data: bytes, used: list[tuple[int, int]]) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        begin, length = draw.choice(used)
        at = begin + draw.randrange(length)
        match draw.randrange(3):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                found[at] = draw.choice((0, 255, 0x41))
            case _:
                found[at : at + 8] = bytes([draw.choice((0, 255, 0x7F))]) * 8
    return bytes(found[: draw.randrange(len(found))] if draw.random() < 0.05 else found)


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from spots(inner, (*path, key))


def misstated(draw: random.Random, value: Any) -> Any:
    made = copy.deepcopy(value)
    path = draw.choice(list(spots(made)))
    if not path:
        return draw.choice(_VALUES)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if draw.random() < 0.2:
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw.choice(_VALUES)
    return made


def with_text(file: TraceFile, data: bytes, texts: dict[str, str]) -> bytes:
    """The trace with other sections of text."""
    found, begin = bytearray(data), file.sections["live"]["offset"]
    live = np.frombuffer(data[begin : begin + LIVE.itemsize], LIVE).copy()
    for name, text in texts.items():
        at, content = file.sections[name]["offset"], text.encode()
        found[at : at + len(content)] = content
        live[f"{name}_bytes"] = len(content)
    found[begin : begin + LIVE.itemsize] = live.tobytes()
    return bytes(found)


def bytes_damaged(run: Path, seed: int, count: int) -> int:
    """How many of `count` gave a report."""
    path = min(run.rglob("*.trace"))
    data, file = path.read_bytes(), TraceFile.open(path)
    sections = file.sections
    tables = ("live", "events", "sums", "windows")
    used = [(0, 2000)]
    used += [(sections[n]["offset"], min(sections[n]["bytes"], 20_000)) for n in tables]
    used += [(sections["meta"]["offset"], int(file.live[0]["meta_bytes"]))]
    reported = 0
    try:
        for number in range(count):
            path.write_bytes(damaged(random.Random(f"{seed}/{number}"), data, used))
            reported += told(run)
    finally:
        path.write_bytes(data)
    return reported


def texts_misstated(run: Path, seed: int, count: int) -> int:
    path = min(run.rglob("*.trace"))
    data, file = path.read_bytes(), TraceFile.open(path)
    meta = json.loads(file.text("meta"))
    notes = [{"kind": kind, "at_ns": 1, "text": "x", "step": 3, "ranks": [0]} for kind in _KINDS]
    reported = 0
    try:
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            said: list[Any] = [meta, notes, {"forward": [["a.py:1", 3]]}]
            which = draw.randrange(3)
            said[which] = misstated(draw, said[which])
            lines = said[1] if isinstance(said[1], list) else [said[1]]
            texts = {"meta": json.dumps(said[0]), "stacks": json.dumps(said[2])}
            path.write_bytes(
                with_text(file, data, {**texts, "notes": "\n".join(map(json.dumps, lines))})
            )
            reported += told(run)
    finally:
        path.write_bytes(data)
    return reported


@pytest.mark.long
def test_bytes_are_damaged(run: Path) -> None:
    assert 20 < bytes_damaged(run, 0, 60) <= 60


@pytest.mark.long
def test_texts_say_something_else(run: Path) -> None:
    assert 20 < texts_misstated(run, 0, 60) <= 60


def test_a_table_without_a_field_is_told_as_damage(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"run_delay_ns"', b'"run-delay_ns"', 1))
    try:
        problems = TracedRun.load(run).problems
    finally:
        path.write_bytes(data)
    assert any(
        "is damaged: its header says no sections (KeyError('run_delay_ns'))" in p for p in problems
    )


def test_what_makes_no_sense_is_named(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data, file = path.read_bytes(), TraceFile.open(path)
    meta = {**json.loads(file.text("meta")), "node": "x", "size": 10**30}
    texts = {
        "meta": json.dumps(meta),
        "stacks": '{"forward": [["a.py:1", 3], 7]}',
        "notes": '{"kind": 3}',
    }
    path.write_bytes(with_text(file, data, texts))
    try:
        problems = " ".join(TracedRun.load(run).problems)
    finally:
        path.write_bytes(data)
    assert "its meta makes no sense of" in problems and "size" in problems and "node" in problems
    assert "its stacks cannot be read in part" in problems and "a note cannot be read" in problems


def test_a_loss_that_is_no_number_is_no_damage(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data, file = path.read_bytes(), TraceFile.open(path)
    note = {"kind": "loss", "step": 3, "value": float("nan")}
    path.write_bytes(with_text(file, data, {"notes": json.dumps(note)}))
    try:
        found = TracedRun.load(run)
        assert "a note cannot be read" not in " ".join(found.problems)
        assert [n["kind"] for n in found.ranks[0].notes] == ["loss"] and told(run)
    finally:
        path.write_bytes(data)


def test_numbers_of_steps_that_do_not_fit(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data, section = path.read_bytes(), TraceFile.open(path).sections["windows"]
    fields = np.dtype([tuple(field) for field in section["fields"]])
    spoilt = bytearray(data)
    rows = np.frombuffer(spoilt, fields, section["items"], section["offset"])
    rows["first_step"][0] = 2**32 - 1
    path.write_bytes(spoilt)
    try:
        told(run)
    finally:
        path.write_bytes(data)


def test_a_command_and_a_layout_that_are_none(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data, file = path.read_bytes(), TraceFile.open(path)
    meta = json.loads(file.text("meta"))
    spoilt = json.dumps({**meta, "command": True, "layout": {"data": "x"}})
    path.write_bytes(with_text(file, data, {"meta": spoilt}))
    try:
        assert told(run)
    finally:
        path.write_bytes(data)


def test_fields_of_no_known_kind(run: Path) -> None:
    path = min(run.rglob("*.trace"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"<i8"', b'"<a8"', 1))
    try:
        with pytest.raises(TraceError, match="'<a8' is no number"):
            TraceFile.open(path)
    finally:
        path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_many_traces_are_damaged(seed: int, run: Path) -> None:
    assert bytes_damaged(run, seed, 2000) > 0
    assert texts_misstated(run, seed, 2000) > 0
