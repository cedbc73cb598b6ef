"""What was measured, as a table, as a drawing, and where."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fivefold.arena.native import core, problem
from fivefold.bench.contender import CONTENDERS
from fivefold.bench.measure import Measurement, Sweep
from fivefold.cluster.processors import processors
from fivefold.errors import UsageError

__all__ = ["environment", "plot", "show"]


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures; no names of machines or folders."""
    from importlib.metadata import version

    return {
        "cpu": processors().model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "instructions": "none" if problem() else core().ff_instructions().decode(),
        "load_before": os.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
    }


def show(sweep: Sweep, console: Console) -> None:
    """Print times in microseconds: of one contender the spread as well, of several how they compare."""
    request = sweep.request
    nodes = sweep.environment.get("nodes", 1)
    where = f" on {nodes} nodes" if nodes > 1 else ""
    what = f"{request.operation} of {request.dtype}, {request.ranks} ranks{where}"
    unit = "MB/s of all pairs together" if request.in_rates else "microseconds"
    console.print(f"{what}; {unit}, median over rounds", highlight=False)
    console.print(_overlap_table(sweep) if request.overlap else _table(sweep, console.is_terminal))
    load, cores = sweep.environment["load_before"], sweep.environment["cores"]
    if load > 0.5:
        console.print(
            f"note: others kept {load:.1f} of {cores} cores busy before this began; figures of a machine "
            "that is not quiet mean little",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    for name, found in sweep.results.items():
        for problem_ in dict.fromkeys(m.error for m in found if m.error):
            console.print(
                f"note: {name}: {problem_}", style="yellow", highlight=False, soft_wrap=True
            )
        wrong = [m.size_bytes for m in found if not m.right]
        if wrong:
            console.print(f"wrong results: {name} at {wrong} bytes", style="bold red")


def _table(sweep: Sweep, pretty: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if pretty else None, pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right")
    first, *others = sweep.results
    for name in sweep.results:
        table.add_column(name, justify="right")
    for heading in [f"{name} / {first}" for name in others] or ["least", "most"]:
        table.add_column(heading, justify="right")
    for at, measured in enumerate(sweep.results[first]):
        row = [found[at] for found in sweep.results.values()]
        ratios = [
            f"{_figure(m, m.median_s) / _figure(measured, measured.median_s):.2f}" for m in row[1:]
        ]
        spread = sorted(_figure(measured, s) for s in (measured.least_s, measured.most_s))
        table.add_row(
            size_text(measured.size_bytes),
            *map(_cell, row),
            *(ratios or [f"{figure:.1f}" for figure in spread]),
        )
    return table


def _figure(m: Measurement, seconds: float) -> float:
    """Microseconds, or what was moved in that time, in MB/s."""
    return m.moved_bytes / seconds / 1e6 if m.moved_bytes else 1e6 * seconds


def _overlap_table(sweep: Sweep) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("bytes", "contender", "pure", "compute", "total", "overlap %"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, found in sweep.results.items():
        for m in found:
            times = (m.pure_s, m.compute_s, m.median_s)
            cells = [f"{1e6 * t:.1f}" for t in times] if not m.error else ["-"] * 3
            table.add_row(size_text(m.size_bytes), name, *cells, f"{m.overlap_percent:.0f}")
    return table


def _cell(m: Measurement) -> str:
    return "-" if m.error else f"{_figure(m, m.median_s):.1f}"


def size_text(size_bytes: int) -> str:
    """Short where it can be.

    >>> size_text(4), size_text(65536), size_text(3 << 20)
    ('4', '64K', '3M')
    """
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def plot(sweep: Sweep, path: Path) -> None:
    """Draw times over sizes, both logarithmic. Raises `UsageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'fivefold[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, found in sweep.results.items():
        there = [m for m in found if not m.error]
        axes.loglog(
            [m.size_bytes for m in there],
            [_figure(m, m.median_s) for m in there],
            "o-",
            label=CONTENDERS[name],
        )
    unit = "MB/s" if sweep.request.in_rates else "microseconds"
    axes.set(xlabel="bytes per rank", ylabel=unit, title=sweep.request.operation)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, format="svg")
