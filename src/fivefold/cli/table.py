"""How the report of a verification looks on a terminal, and in a file."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.train.verify.report import Quantity, Report, TensorReport

__all__ = ["show"]

_OWN = {"float64": "1-ulp noise", "float32": "one process"}


def show(report: Report, console: Console) -> None:
    """Print what was compared, a table of errors, what stood out, and the verdict as the last line."""
    steps = f"{report.steps} step{'s' if report.steps > 1 else ''}"
    samples = f"{report.samples} sample{'s' if report.samples > 1 else ''}"
    console.print(
        f"{report.model} in {report.dtype}: {steps} of {samples} under {report.layout} against the "
        "unmodified model in one process",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report, pretty=console.is_terminal))
    if not report.passed:
        for item in report.worst:
            console.print(_line(item), highlight=False, markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(
            f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )
    style = "bold green" if report.passed else "bold red"
    console.print(Text(report.verdict(), style=style), soft_wrap=True)


def _table(report: Report, *, pretty: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if pretty else None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("largest error", "tolerance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(_OWN[report.dtype], justify="right", no_wrap=True)
    table.add_column("largest in", overflow="fold")
    for quantity in report.quantities:
        table.add_row(*_cells(quantity), style="" if quantity.passed else "red")
    apart = report.replicas
    cells = ("replicas", figure(apart.difference), "0", "", apart.where or "equal on all ranks")
    table.add_row(*cells, style="red" if apart.difference else "")
    return table


def _cells(quantity: Quantity) -> tuple[str, ...]:
    if not quantity.worst:
        return (quantity.name, "-", "-", "-", "the model has none")
    first = quantity.worst[0]
    where = first.name if first.name != quantity.name else ""
    return (quantity.name, *map(figure, (first.error, first.tolerance, first.own)), where)


def _line(item: TensorReport) -> str:
    return (
        f"  {item.name} ({item.quantity}): error {figure(item.error)} in step {item.step + 1}, tolerance "
        f"{figure(item.tolerance)}"
    )


def figure(value: float) -> str:
    """Two digits, as much as an error is worth.

    >>> figure(3.14159e-14), figure(0.0), figure(float("inf"))
    ('3.1e-14', '0', 'infinite')
    """
    if not math.isfinite(value):
        return "infinite"
    return f"{value:.1e}" if value else "0"
