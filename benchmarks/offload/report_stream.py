"""The table of streams: how many were the same, and for how long a batch kept the loop waiting."""

from __future__ import annotations

import statistics
from typing import Any

from figures import table
from publishing import conditions

__all__ = ["section"]

MOST_STALL_S = 2.0


def section(result: dict[str, Any]) -> str:
    """The part as it stands in the README."""
    rows = [_row(row) for row in result["rows"]]
    runs = sum(row["runs"] for row in result["rows"])
    same = sum(row["same"] for row in result["rows"])
    longest = max((max(row["longest_s"], default=0.0) for row in result["rows"]), default=0.0)
    quiet = all(row["quiet_same"] for row in result["rows"])
    made = sum(row["by_helpers"] for row in result["rows"])
    goals = (
        f"Helpers made {made:,} of the batches. Without faults, hashes are {'all' if quiet else 'not all'} "
        "that of a run without helpers. Goal, the same hash in all runs with faults: "
        f"{same} of {runs}: {'met' if same == runs else 'missed'}. Goal, no batch later than "
        f"{MOST_STALL_S:g} s: the longest wait was {longest:.2f} s: "
        f"{'met' if longest < MOST_STALL_S else 'missed'}."
    )
    return "\n\n".join([
        f"### The stream of batches: {result['batches']} batches, helpers killed and stopped at random",
        "Helpers are extra hardware; here all share two cores with the trainer, which makes waits longer.",
        table(_HEADER, rows),
        goals,
        f"sha256 {result['hash'][:16]}... {conditions(result)}",
    ])  # fmt: skip


_HEADER = (
    "helpers", "same stream", "killed", "stopped for up to 1 s", "started again", "longest wait, s",
    "median of runs, s", "without faults, s",
)  # fmt: skip


def _row(row: dict[str, Any]) -> list[str]:
    where = {"local": "on this node", "remote": "on nodes of their own"}[row["where"]]
    longest = row["longest_s"]
    return [
        f"{row['helpers']} {where}", f"{row['same']} of {row['runs']}",
        *(str(row["done"][what]) for what in ("kill", "stall", "start")),
        f"{max(longest):.2f}" if longest else "", f"{statistics.median(longest):.2f}" if longest else "",
        f"{row['quiet_longest_s']:.2f}",
    ]  # fmt: skip
