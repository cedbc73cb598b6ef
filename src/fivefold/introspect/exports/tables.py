"""Traces as plain tables, written as CSV or Parquet files: steps, operations, events, notes.

Times are seconds (columns `_s`), those of a moment from the first thing recorded on, on the clock of rank
0's node. What is unknown is empty.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UsageError
from fivefold.introspect.exports.clock import begin_ns, seconds
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import DTYPES, KINDS, NOTHING, PHASES, TAGS
from fivefold.writing import opened_anew

__all__ = ["TABLES", "Columns", "write_csv", "write_parquet"]

Columns = Mapping[str, NDArray[Any]]
"""a table: columns of equal length by name"""


def steps(trace: RankTrace, zero_ns: int) -> Columns:
    """A row per window of steps: times by phase and tag, samples, loss, what the machine said."""
    rows = trace.windows
    found = {
        "first_step": rows["first_step"], "steps": rows["steps"],
        "begin_s": seconds(trace, rows["begin_ns"], zero_ns),
        "end_s": seconds(trace, rows["end_ns"], zero_ns),
        "samples": rows["samples"], "loss": rows["loss"],
    }  # fmt: skip
    for i, phase in enumerate(PHASES):
        found[f"{phase}_s"] = rows["phase_ns"][:, i] / 1e9
    for i, tag in enumerate(TAGS):
        name = tag.replace(" ", "_").replace("-", "_")
        found[f"{name}_s"] = rows["tag_ns"][:, i] / 1e9
        found[f"{name}_blocked_s"] = rows["tag_blocked_ns"][:, i] / 1e9
        found[f"{name}_bytes"] = rows["tag_bytes"][:, i]
    for name in ("cpu_ns", "run_delay_ns", "throttled_ns"):
        found[f"{name.removesuffix('_ns')}_s"] = rows[name] / 1e9
    for name in ("switched", "faults", "gpu_busy", "ready", "energy_j"):
        found[name] = rows[name]
    for name in ("rss_bytes", "gpu_bytes", "sent_bytes", "received_bytes"):
        found[name] = np.where(rows[name] < 0, np.nan, rows[name])
    return found


def operations(trace: RankTrace, zero_ns: int) -> Columns:  # noqa: ARG001 - as the others
    """A row per operation or span, tag, phase, group, element type and size: how often, how long."""
    rows = trace.sums
    sizes = np.where(rows["bucket"] > 0, 2.0 ** (rows["bucket"].astype(float) - 1), 0)
    return {
        **_what(rows), "size_from_bytes": sizes.astype(np.int64), "count": rows["count"],
        "bytes": rows["size_bytes"], "total_s": rows["total_ns"] / 1e9,
        "blocked_s": rows["blocked_ns"] / 1e9, "min_s": rows["min_ns"] / 1e9,
        "mean_s": rows["total_ns"] / 1e9 / np.maximum(rows["count"], 1),
        "max_s": rows["max_ns"] / 1e9, "cpu_s": rows["cpu_ns"] / 1e9,
    }  # fmt: skip


def events(trace: RankTrace, zero_ns: int) -> Columns:
    """A row per operation or span that is still in the ring."""
    rows = trace.events
    return {
        **_what(rows), "number": rows["number"], "step": rows["step"], "peer": rows["peer"],
        "bytes": rows["size_bytes"], "begin_s": seconds(trace, rows["begin_ns"], zero_ns),
        "all_came_s": seconds(trace, rows["start_ns"], zero_ns),
        "end_s": seconds(trace, rows["end_ns"], zero_ns), "blocked_s": rows["blocked_ns"] / 1e9,
        "cpu_s": rows["cpu_ns"] / 1e9,
    }  # fmt: skip


def notes(trace: RankTrace, zero_ns: int) -> Columns:
    """A row per note: losses, saves, failures; what it says as JSON."""
    times = np.array([int(note.get("at_ns", 0)) for note in trace.notes], np.int64)
    return {
        "kind": np.array([str(note["kind"]) for note in trace.notes], object),
        "at_s": seconds(trace, times, zero_ns),
        "note": np.array([json.dumps(note) for note in trace.notes], object),
    }


TABLES: dict[str, Callable[[RankTrace, int], Columns]] = {
    "steps": steps, "operations": operations, "events": events, "notes": notes,
}  # fmt: skip
"""by name of the file; each has the column `rank` first"""


def _what(rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """Fields that are numbers in the file, as words."""
    groups = rows["group"].astype(np.int64)
    return {
        "kind": _words(KINDS, rows["kind"]), "tag": _words(TAGS, rows["tag"]),
        "phase": _words(PHASES, rows["phase"]), "group": np.where(groups == NOTHING, -1, groups),
        "dtype": _words(DTYPES, rows["dtype"]),
    }  # fmt: skip


def _words(names: Sequence[str], numbers: NDArray[np.uint8]) -> NDArray[Any]:
    known = np.array([*names, *[""] * (256 - len(names))], object)
    return known[numbers]


def _tables(traces: Sequence[RankTrace]) -> Iterator[tuple[str, Iterator[dict[str, NDArray[Any]]]]]:
    zero_ns = begin_ns(traces)
    for name, table in TABLES.items():
        yield (
            name,
            (_ranked(trace.rank, table(trace, zero_ns)) for trace in traces),
        )


def _ranked(rank: int, columns: Columns) -> dict[str, NDArray[Any]]:
    length = len(next(iter(columns.values())))
    return {"rank": np.full(length, rank, np.int32), **columns}


def write_csv(traces: Sequence[RankTrace], out: Path) -> str:
    """Files steps.csv, operations.csv, events.csv and notes.csv in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in _tables(traces):
        with opened_anew(out / f"{name}.csv", newline="") as file:
            writer = csv.writer(file)
            for i, columns in enumerate(parts):
                if i == 0:
                    writer.writerow(columns)
                writer.writerows(zip(*(_cells(c) for c in columns.values()), strict=True))
    return f"wrote {', '.join(f'{name}.csv' for name in TABLES)} to {out}"


def _cells(column: NDArray[Any]) -> list[Any]:
    """Values as Python's, nan as nothing."""
    if column.dtype.kind != "f":
        return column.tolist()
    return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - nan


def write_parquet(traces: Sequence[RankTrace], out: Path) -> str:
    """The same as Parquet files, a row group per rank. Raises `UsageError` without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise UsageError(
            "Parquet files need pyarrow: pip install 'fivefold[exports]', or export csv"
        ) from None
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in _tables(traces):
        writer = None
        with opened_anew(out / f"{name}.parquet", binary=True) as file:
            for columns in parts:
                # from_pandas: nan becomes null
                arrays = {n: pa.array(c, from_pandas=True) for n, c in columns.items()}
                table = pa.table({n: _text(pa, a) for n, a in arrays.items()})
                writer = writer or ParquetWriter(file, table.schema)
                writer.write_table(table)
            if writer:
                writer.close()
    return f"wrote {', '.join(f'{name}.parquet' for name in TABLES)} to {out}"


def _text(pa: Any, array: Any) -> Any:
    """A column without a word in it is text nevertheless."""
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array
