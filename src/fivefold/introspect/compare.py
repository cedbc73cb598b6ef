"""Two runs side by side: what became faster or slower, and what they were told differently."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

from fivefold.introspect.document import made_by
from fivefold.introspect.numbers import rounded, seconds_text, share_text
from fivefold.introspect.shape import (
    SHAPE,
    Change,
    Comparison,
    Document,
    FindingData,
    Side,
    Verdict,
)

__all__ = ["change", "compared"]

_SAME = 0.02
"""relative change of the step's time that is not worth a word"""
_EXPLAINS = 0.25
"""share of that change from which a finding is named as its cause"""
_RUN = ("size", "nodes", "per_node", "engine", "backend", "device", "threads", "layout", "command")
"""facts of runs that are configuration"""
_PLACES = ("FIVEFOLD_LOG_DIR", "FIVEFOLD_TRACE")


def compared(a: Document, b: Document) -> Comparison:
    """What changed from one run to the other, by their reports."""
    parts = {kind: _changes(_parts(a, kind), _parts(b, kind)) for kind in ("phase", "exposed")}
    differences = _differences(a, b)
    only = (_without(a, b), _without(b, a))
    made: Any = {
        "shape": SHAPE, "kind": "comparison", **made_by(),
        "verdict": _verdict(a, b, [*parts["phase"], *parts["exposed"]], differences, only),
        "a": _side(a), "b": _side(b), "figures": _figures(a, b), "phases": parts["phase"],
        "tags": parts["exposed"], "only_a": only[0], "only_b": only[1],
        "operations": _changes(_operations(a), _operations(b)),
        "differences": differences, "documents": [a, b],
    }  # fmt: skip
    return cast("Comparison", made)


def change(name: str, a: float | None, b: float | None, unit: str = "s") -> Change:
    """A figure of both.

    >>> change("step", 2.0, 3.0)
    {'name': 'step', 'a': 2, 'b': 3, 'change': 1, 'ratio': 1.5, 'unit': 's'}
    """
    apart = None if a is None or b is None else b - a
    ratio = None if b is None or not a else b / a
    return {
        "name": name, "a": rounded(a), "b": rounded(b), "change": rounded(apart),
        "ratio": rounded(ratio), "unit": unit,
    }  # fmt: skip


def _side(of: Document) -> Side:
    return {
        "title": of["run"]["title"], "path": of["run"]["path"], "ranks": of["run"]["size"],
        "step_s": of["steady"]["step_s"] if of["steady"] else None,
        "samples_per_s": of["throughput"]["samples_per_s"], "verdict": of["verdict"]["text"],
    }  # fmt: skip


def _figures(a: Document, b: Document) -> list[Change]:
    def most(of: Document, name: str) -> float | None:
        column: Any = of["ranks"].get(name) or []
        return max((value for value in column if value is not None), default=None)

    rows = [
        change("step", _side(a)["step_s"], _side(b)["step_s"]),
        change("samples per second", _side(a)["samples_per_s"], _side(b)["samples_per_s"], "1/s"),
        change("of one process times ranks", _measured(a), _measured(b), "share"),
        change("longest work of a rank", most(a, "work_s"), most(b, "work_s")),
        change("memory, largest rank", most(a, "rss_bytes"), most(b, "rss_bytes"), "bytes"),
        change("last loss", _last(a["series"]["loss"]), _last(b["series"]["loss"]), ""),
    ]
    return [row for row in rows if row["a"] is not None or row["b"] is not None]


def _measured(of: Document) -> float | None:
    told = of["throughput"]
    return told["ratio"] if told["one_process_from"] == "measured" else None


def _last(values: list[float | None]) -> float | None:
    return values[-1] if values else None


def _parts(of: Document, kind: str) -> dict[str, float]:
    return {row["part"]: row["seconds"] for row in of["breakdown"] if row["kind"] == kind}


def _operations(of: Document) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for row in of["operations"]:
        total[f"{row['tag']}: {row['operation']}"] += row["total_s"]
    times = max(1, of["run"]["steps"] * of["run"]["read"])
    return {name: seconds / times for name, seconds in total.items()}


def _changes(a: Mapping[str, float], b: Mapping[str, float]) -> list[Change]:
    """Largest change first."""
    rows = [change(name, a.get(name, 0.0), b.get(name, 0.0)) for name in {**a, **b}]
    return sorted(rows, key=lambda row: -abs(row["change"] or 0.0))


def _differences(a: Document, b: Document) -> list[dict[str, Any]]:
    plans = [{row["key"]: row for row in of["configuration"]["plan"]} for of in (a, b)]
    found = [
        {"section": "plan", "key": key, "a": _of(plans[0], key, "value"), "b": _of(plans[1], key, "value"),
         "origin_a": _of(plans[0], key, "origin"), "origin_b": _of(plans[1], key, "origin")}
        for key in _keys(plans) if _of(plans[0], key, "value") != _of(plans[1], key, "value")
    ]  # fmt: skip
    sections: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("environment", _environment(a), _environment(b)),
        ("version", dict(a["configuration"]["versions"]), dict(b["configuration"]["versions"])),
        ("run", _facts(a), _facts(b)),
    ]
    for section, one, other in sections:
        found += [
            {"section": section, "key": key, "a": one.get(key), "b": other.get(key),
             "origin_a": None, "origin_b": None}
            for key in _keys([one, other]) if one.get(key) != other.get(key)
        ]  # fmt: skip
    return found


def _without(of: Document, other: Document) -> list[FindingData]:
    """Findings that the other run does not have: of another rule, cause, tag or rank."""
    known = [_what(finding) for finding in other["findings"]]
    return [finding for finding in of["findings"] if _what(finding) not in known]


def _what(finding: FindingData) -> tuple[Any, ...]:
    figures = finding["figures"]
    return finding["id"], figures.get("cause"), figures.get("tag"), tuple(finding["ranks"])


def _keys(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _of(table: Mapping[str, Mapping[str, Any]], key: str, part: str) -> Any:
    return table[key][part] if key in table else None


def _environment(of: Document) -> dict[str, Any]:
    """Values that all ranks share. Where a run writes to differs from run to run, and says nothing."""
    rows = of["configuration"]["environment"]
    return {
        row["name"]: row["value"] for row in rows
        if row["ranks"] is None and row["name"] not in _PLACES
    }  # fmt: skip


def _facts(of: Document) -> dict[str, Any]:
    facts: Any = of["run"]
    return {name: facts[name] for name in _RUN}


def _cause(a: Document, b: Document, found: list[FindingData], apart_s: float) -> str:
    """The finding that only the slower run has, if it explains a part of the difference."""
    faster = (_side(a)["step_s"] or 0.0) > (_side(b)["step_s"] or 0.0)
    costs = [f for f in found if (f["gain_s_per_step"] or 0.0) >= _EXPLAINS * apart_s]
    if not costs:
        return ""
    # One of communication of a tag may be the trace of a late rank, which tells more.
    first = next((f for f in costs if f["id"] != "exposed"), costs[0])
    return f". Only in {(a if faster else b)['run']['title']}: {first['title']}"


def _verdict(
    a: Document, b: Document, parts: list[Change], differences: list[dict[str, Any]],
    only: tuple[list[FindingData], list[FindingData]],
) -> Verdict:  # fmt: skip
    one, other = _side(a)["step_s"], _side(b)["step_s"]
    if not one or not other:
        return {
            "text": "One of the runs has no steps: there is nothing to compare.",
            "level": "notice",
        }
    ratio = other / one - 1
    if abs(ratio) < _SAME:
        text = f"Steps take the same time: {seconds_text(one)} and {seconds_text(other)}."
        return {"text": text, "level": "notice"}
    faster = ratio < 0
    text = (
        f"Steps of {b['run']['title']} take {share_text(abs(ratio))} {'less' if faster else 'more'}: "
        f"{seconds_text(other)} instead of {seconds_text(one)}"
    )
    worst = max(parts, key=lambda row: (row["change"] or 0.0) * (-1 if faster else 1), default=None)
    if worst and worst["change"]:
        before, after = seconds_text(worst["a"] or 0), seconds_text(worst["b"] or 0)
        text += f", most of it in {worst['name']} ({before} to {after})"
    text += _cause(a, b, only[0] if faster else only[1], abs(other - one))
    keys = [
        str(row["key"])
        for row in differences
        if row["section"] in ("plan", "environment", "version")
    ]
    if keys:
        text += (
            f". Configured otherwise: {', '.join(keys[:5])}{' and more' if len(keys) > 5 else ''}"
        )
    return {"text": text + ".", "level": "good" if faster else "bad"}
