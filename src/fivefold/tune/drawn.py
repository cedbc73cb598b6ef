"""What was tried, as a picture."""

from __future__ import annotations

from pathlib import Path

from fivefold.tune.instances import Found

__all__ = ["draw"]


def draw(found: Found, title: str, path: Path) -> None:
    """Bars of rates as SVG, the fastest on top. Needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = [row for row in found.rows if row.rate][::-1]
    figure = Figure(figsize=(7, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    kinds = {True: "chosen", False: "exact"}
    colours = {"chosen": "tab:blue", "exact": "tab:gray", "changes results": "lightgray"}
    names = [
        "changes results" if row.choice.changes and row.choice != found.best
        else kinds[row.choice == found.best]
        for row in rows
    ]  # fmt: skip
    for kind, colour in colours.items():
        at = [number for number, name in enumerate(names) if name == kind]
        axes.barh(at, [rows[number].rate for number in at], color=colour, label=kind)
    axes.set_yticks(range(len(rows)), [str(row.choice) for row in rows])
    axes.set(xlabel="samples/s", title=title)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(colours))
    figure.savefig(path, format="svg")
