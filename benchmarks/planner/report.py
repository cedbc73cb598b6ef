"""Results as tables, kept as JSON and shown in README.md between its two markers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import publishing
from figures import Median, middle_half, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
WANTED = {"time": 0.15, "memory": 0.10, "choice": 0.05}
"""largest median errors, and how much slower than the best the choice may be"""


def keep(result: dict[str, Any], name: str, folder: Path) -> None:
    """Write `name`.json and renew the README that stands beside the folder of published results."""
    publishing.keep(result, name, folder, HERE, renewed)


def renewed(text: str, folder: Path) -> str:
    """The text of the README with the tables of all results in `folder`."""
    kept = publishing.kept(folder)
    names = sorted(kept, key=lambda name: (kept[name]["part"]["ranks"], name))
    sections = [section(kept[name]) for name in names]
    return publishing.with_sections(text, [overall(list(kept.values())), *sections])


def errors(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """How far predictions are from what was measured, as fractions of it."""
    return [row["predicted"][key] / _measured(row, key) - 1 for row in rows]


def _measured(row: dict[str, Any], key: str) -> float:
    found = row["measured"][key]
    return statistics.median(found) if isinstance(found, list) else found


def section(result: dict[str, Any]) -> str:
    """Heading, table, goals and conditions of one part."""
    part, rows = result["part"], result["rows"]
    title = f"{part['model']}, {part['batch']} of {part['image']}x{part['image']}"
    told = [
        f"### {title}, {part['ranks']} ranks",
        table(_HEADER, [_row(row) for row in rows]),
        *_goals(rows),
        *(f"Could not be run: {line}." for line in result["failed"]),
        f"{result['steps']} steps of each candidate; {publishing.conditions(result)}",
    ]
    return "\n\n".join(told)


_HEADER = [
    "candidate, as predicted", "s/step", "middle half", "predicted", "error", "MiB", "predicted", "error",
]  # fmt: skip


def _row(row: dict[str, Any]) -> list[str]:
    told, found = row["predicted"], row["measured"]
    return [
        row["candidate"],
        f"{statistics.median(found['step_s']):.3f}",
        middle_half(found["step_s"], 3),
        f"{told['step_s']:.3f}",
        f"{errors([row], 'step_s')[0]:+.0%}",
        f"{found['memory_bytes'] / 2**20:.0f}",
        f"{told['memory_bytes'] / 2**20:.0f}",
        f"{errors([row], 'memory_bytes')[0]:+.0%}",
    ]


def _goals(rows: Sequence[dict[str, Any]]) -> list[str]:
    best = min(_measured(row, "step_s") for row in rows)
    behind = _measured(rows[0], "step_s") / best - 1
    judged = "met" if behind <= WANTED["choice"] else "missed"
    return [
        *(
            _error(rows, what, key)
            for what, key in (("time", "step_s"), ("memory", "memory_bytes"))
        ),
        f"Goal, the choice at most {WANTED['choice']:.0%} slower than the best: {behind:.1%}: {judged}.",
    ]


def _error(rows: Sequence[dict[str, Any]], what: str, key: str) -> str:
    found, wanted = Median.of([abs(error) for error in errors(rows, key)]), WANTED[what]
    return (
        f"Goal, error of {what} at most {wanted:g} in the median: {found}: {found.at_most(wanted)}."
    )


def overall(results: Sequence[dict[str, Any]]) -> str:
    """The median errors over all candidates of all parts."""
    rows = [row for result in results for row in result["rows"]]
    told = [
        _error(rows, what, key) for what, key in (("time", "step_s"), ("memory", "memory_bytes"))
    ]
    return "\n\n".join([f"### All {len(rows)} candidates", *told])
