"""Traces for other programs: Perfetto, spreadsheets, Parquet, Prometheus, TensorBoard.

    RankTrace, RankTrace, ...  -->  clock (one time for all)  -->  tables --> csv, parquet
                                                              -->  perfetto, tensorboard, prometheus

Each module has `write(traces, out) -> str`: it writes below `out` and says in a line what it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fivefold.errors import UsageError, suggest
from fivefold.introspect.run import trace_files
from fivefold.trace.file import TraceError
from fivefold.trace.reader import RankTrace

__all__ = ["FORMATS", "check", "export", "read"]

FORMATS = ("perfetto", "csv", "parquet", "prometheus", "tensorboard")
"""what `fivefold report --export` writes"""
_MODULES = {"csv": "tables", "parquet": "tables"}


def export(name: str, traces: Sequence[RankTrace], out: Path) -> str:
    """Write `traces` as `name`, one of `FORMATS`, below or to `out`; what was written, in a line.

    Raises `UsageError` for an unknown format, a package that is missing, a place that cannot be written.
    """
    check(name)
    module = import_module(f"fivefold.introspect.exports.{_MODULES.get(name, name)}")
    writer = getattr(module, f"write_{name}")
    try:
        return writer(traces, out)
    except OSError as problem:
        raise UsageError(f"cannot write {out}: {problem.strerror or problem}") from None


def check(name: str) -> None:
    """Raises `UsageError` unless `name` is one of `FORMATS`."""
    if name not in FORMATS:
        raise UsageError(f"unknown export {name!r}{suggest(name, FORMATS)}")


def read(path: Path) -> tuple[list[RankTrace], list[str]]:
    """All that the traces of a run hold, and what could not be read, a line each.

    Unlike `TracedRun.load` it leaves nothing out where there are many ranks. Raises `UsageError` if there
    is nothing to read.
    """
    found: list[RankTrace] = []
    problems: list[str] = []
    for file in trace_files(path):
        try:
            found.append(RankTrace.load(file))
        except TraceError as problem:
            problems.append(str(problem))
    if not found:
        raise UsageError(problems[0])
    return sorted(found, key=lambda trace: trace.rank), problems
