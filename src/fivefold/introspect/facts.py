"""What ran, how it was configured, and what happened: what a report says that is not measured per step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fivefold.introspect.groups import Group
from fivefold.introspect.link_use import Way, ways
from fivefold.introspect.numbers import bytes_text, plain, seconds_text
from fivefold.introspect.operations import Calibrated, calibration
from fivefold.introspect.run import FULL, TracedRun
from fivefold.introspect.shape import Calibration, Configuration, Mark, RunFacts
from fivefold.introspect.steps import Steps

__all__ = ["calibrated", "configuration", "facts", "first_told", "marks"]

_MARKS = ("checkpoint", "failure", "recovery", "hang", "mismatch", "helper", "warning")
_MOST_MARKS = 1000


def first_told(run: TracedRun, name: str) -> Any:
    """A field of meta, of the first rank that has it."""
    return next((t.meta[name] for t in run.ranks if t.meta.get(name) not in (None, "")), None)


def facts(run: TracedRun, steps: Steps | None, known: Mapping[tuple[int, int], Group]) -> RunFacts:
    """What ran, and where."""
    hosts = [str(t.meta.get("host") or "unknown") for t in run.ranks]
    text = {
        name: first_told(run, name)
        for name in ("engine", "launcher", "backend", "device", "started")
    }
    threads = [t.meta["threads"] for t in run.ranks if isinstance(t.meta.get("threads"), int)]
    layout, command = first_told(run, "layout"), first_told(run, "command")
    return {
        "path": str(run.path), "title": _title(run), "state": run.state, "size": run.size,
        "read": len(run.ranks), "nodes": len(set(hosts)), "hosts": list(dict.fromkeys(hosts)),
        "per_node": max(Counter(hosts).values()),
        "command": [str(word) for word in command] if isinstance(command, list) else [],
        "engine": _text(text["engine"]), "launcher": _text(text["launcher"]),
        "backend": _text(text["backend"]), "device": _text(text["device"]),
        "threads": max(threads, default=None), "started": _text(text["started"]),
        "layout": {str(k): v for k, v in layout.items() if isinstance(v, int)}
        if isinstance(layout, dict) else {},
        "seconds": steps.seconds if steps else 0.0,
        "steps": int(steps.count.max(0).sum()) if steps else 0,
        "groups": _groups(known),
        "clock_error_s": max(float(t.meta.get("clock_error_ns") or 0) for t in run.ranks) / 1e9,
    }  # fmt: skip


def _title(run: TracedRun) -> str:
    resolved = run.folder.resolve()
    return resolved.parent.name if resolved.name == "trace" else resolved.name


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _groups(known: Mapping[tuple[int, int], Group]) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for (_, index), group in sorted(known.items()):
        row = {"index": index, "name": group.name, "size": group.size,
               "ranks": list(group.ranks[:FULL]), "backend": group.backend}  # fmt: skip
        found.setdefault(group, row)
    return list(found.values())[:FULL]


def configuration(run: TracedRun) -> Configuration:
    """The plan with provenance, environment, versions and placement."""
    versions = first_told(run, "versions")
    return {
        "plan": _plan(run), "environment": _environment(run),
        "versions": {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        "placement": cast("dict[str, Any] | None", plain(run.placement)),
    }  # fmt: skip


def _plan(run: TracedRun) -> list[dict[str, Any]]:
    told = first_told(run, "plan")
    if isinstance(told, dict):
        return [
            {"key": str(key), "value": plain(_part(entry, "value")),
             "origin": str(_part(entry, "origin") or "default")}
            for key, entry in told.items()
        ]  # fmt: skip
    origins = run.plan.get("provenance")
    origins = origins if isinstance(origins, dict) else {}
    return [
        {"key": f"{section}.{key}", "value": plain(value),
         "origin": str(origins.get(f"{section}.{key}", "default"))}
        for section, values in run.plan.items() if section != "provenance" and isinstance(values, dict)
        for key, value in values.items()
    ]  # fmt: skip


def _part(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else (entry if name == "value" else None)


def _environment(run: TracedRun) -> list[dict[str, Any]]:
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in run.ranks:
        told = trace.meta.get("environment")
        for name, value in told.items() if isinstance(told, dict) else ():
            values[str(name)][str(value)].append(trace.rank)
    return [
        {
            "name": name,
            "value": value,
            "ranks": None if len(ranks) == len(run.ranks) else ranks[:FULL],
        }
        for name, found in sorted(values.items())
        for value, ranks in list(found.items())[:8]
    ]


def calibrated(run: TracedRun) -> Calibration:
    """What was measured at start, and how links were used since."""
    told = first_told(run, "links")
    rows = first_told(run, "calibration")
    if told is None and isinstance(rows, dict):
        told = rows.get("links")
    links = (
        [plain(link) for link in told if isinstance(link, dict)] if isinstance(told, list) else []
    )
    hosts = {t.rank: str(t.meta.get("host") or "") for t in run.ranks}
    for link in links:
        link["hosts"] = [hosts.get(rank, "") for rank in link.get("ranks") or []]
    return {
        "curves": [_curve(found) for found in calibration(run)], "links": links,
        "used": [_used(way) for way in sorted(ways(run), key=lambda way: -way.in_use)],
    }  # fmt: skip


def _used(way: Way) -> dict[str, Any]:
    return plain({
        "hosts": list(way.hosts), "ranks": [list(ranks) for ranks in way.ranks],
        "bytes_per_step": way.bytes / max(1, way.steps), "in_use": way.in_use,
        "bytes_per_s": way.bytes_per_s,
    })  # fmt: skip


def _curve(found: Calibrated) -> dict[str, Any]:
    pairs = list(zip(found.sizes_bytes, found.seconds, strict=True))
    return {
        "operation": found.operation, "group": found.group, "sizes_bytes": list(found.sizes_bytes),
        "seconds": plain(list(found.seconds)), "bytes_per_s": plain([n / s for n, s in pairs]),
    }  # fmt: skip


def marks(run: TracedRun, steps: Steps | None) -> list[Mark]:
    """Checkpoints, failures, hangs and warnings of all ranks, in order of time."""
    found: list[tuple[float, Mark]] = []
    for trace in run.ranks:
        offset = int(trace.meta.get("clock_offset_ns") or 0)
        for note in trace.notes:
            kind = str(note["kind"])
            if kind not in _MARKS or (kind == "checkpoint" and trace.rank != run.ranks[0].rank):
                continue
            at = note.get("at_ns")
            when = (
                (at + offset - (steps.origin_ns if steps else 0)) / 1e9
                if isinstance(at, int)
                else None
            )
            mark: Mark = {
                "kind": kind, "at_s": when if steps else None, "step": _number(note.get("step")),
                "rank": trace.rank, "text": _told(kind, note), "details": plain(note),
            }  # fmt: skip
            found.append((when if when is not None else np.inf, mark))
    return [mark for _, mark in sorted(found, key=lambda pair: pair[0])][:_MOST_MARKS]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _told(kind: str, note: dict[str, Any]) -> str:
    if note.get("text"):
        return str(note["text"])
    words = [kind, str(note.get("level") or "")]
    if isinstance(note.get("bytes"), int | float):
        words.append(f"of {bytes_text(note['bytes'])}")
    if isinstance(note.get("seconds"), int | float):
        words.append(f"in {seconds_text(note['seconds'])}")
    return " ".join(word for word in words if word)
