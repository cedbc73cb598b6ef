"""A report on a terminal: the verdict, where a step goes, what to do about it, and what is missing."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.introspect.numbers import bytes_text, seconds_text, share_text
from fivefold.introspect.shape import Change, Comparison, Document, FindingData
from fivefold.introspect.tables import Supply

__all__ = ["show", "show_comparison"]

_STYLES = {"good": "bold green", "notice": "bold yellow", "bad": "bold red"}
_BAR = 24
_OPERATIONS = _HELPERS = 8
_WAYS = 6
_SHARES = ("computes", "waits for trainers")
_PARTS = 0.002
"""share of a step from which a part is shown"""


def show(document: Document, console: Console) -> None:
    """Print what a person should know of a run."""
    _line(console, _head(document))
    console.print(
        Text(document["verdict"]["text"], style=_STYLES[document["verdict"]["level"]]),
        soft_wrap=True,
    )
    if document["breakdown"]:
        console.print(_breakdown(document, console.is_terminal))
    if document["findings"]:
        console.print("\nwhat would help, each by itself and at most", highlight=False)
        for number, finding in enumerate(document["findings"], start=1):
            _finding(console, number, finding)
    if document["operations"]:
        console.print(_operations(document, console.is_terminal))
    if document["calibration"]["used"]:
        console.print(_links(document, console.is_terminal))
    if document["offload"]["helpers"]:
        console.print(_helpers(document, console.is_terminal))
        for row in document["offload"]["supply"][:_OPERATIONS]:
            _line(console, _supplied(row))
    for problem in document["problems"]:
        _line(console, f"note: {problem}", "yellow")


def _head(document: Document) -> str:
    run, steady = document["run"], document["steady"]
    parts = [
        f"{run['title']}: {run['size']} rank{'s' if run['size'] > 1 else ''} on "
        + (f"{run['nodes']} nodes" if run["nodes"] > 1 else ", ".join(run["hosts"]) or "a node"),
        {"ended": "ended", "running": "still running", "failed": "failed", "killed": "killed"}[run["state"]]
        + f" after {run['steps']:,} steps",
    ]  # fmt: skip
    if steady:
        parts.append(f"a step takes {seconds_text(steady['step_s'])}")
    speed = document["throughput"]["samples_per_s"]
    if speed:
        parts.append(f"{speed:,.0f} samples/s{_expected(document)}")
    return "; ".join(parts)


def _expected(document: Document) -> str:
    told, size = document["throughput"], document["run"]["size"]
    if not told["ratio"] or (size == 1 and not told["one_process_run"]):
        return ""
    text = f"{share_text(told['ratio'])} of {size} times one process"
    return (
        f", at most {text} (estimated)" if told["one_process_from"] == "estimated" else f", {text}"
    )


def _breakdown(document: Document, pretty: bool) -> Table:
    table = _table(pretty)
    for name in ("a steady step", "per step", "share", "", "least", "most", "of rank"):
        table.add_column(
            name, justify="left" if name in ("a steady step", "") else "right", no_wrap=True
        )
    largest = max(part["share"] for part in document["breakdown"]) or 1.0
    for part in document["breakdown"]:
        if part["share"] < _PARTS:
            continue
        what = {"phase": "", "exposed": "exposed: ", "other": "in no phase"}[part["kind"]]
        name = what if part["kind"] == "other" else what + part["part"]
        bar = "#" * max(1, round(_BAR * part["share"] / largest))
        table.add_row(
            name, seconds_text(part["seconds"]), share_text(part["share"]), bar,
            seconds_text(part["least_s"]), seconds_text(part["most_s"]), str(part["most_rank"]),
            style="cyan" if part["kind"] == "exposed" else "",
        )  # fmt: skip
    return table


def _finding(console: Console, number: int, finding: FindingData) -> None:
    gain = finding["gain_s_per_step"]
    told = f" [-{seconds_text(gain)} per step]" if gain else ""
    _line(console, f"{number}. {finding['title']}{told}", "bold")
    _line(console, f"   {finding['advice']}")


def _operations(document: Document, pretty: bool) -> Table:
    table = _table(pretty)
    left = ("communication", "operation")
    for name in (
        *left,
        "bytes",
        "calls",
        "mean",
        "min",
        "max",
        "exposed",
        "per second",
        "expected",
    ):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in document["operations"][:_OPERATIONS]:
        speed, ratio = row["algorithm_bytes_per_s"], row["expected_ratio"]
        exposed = row["exposed_s"] / row["total_s"] if row["total_s"] else 0.0
        table.add_row(
            row["tag"], row["operation"], bytes_text(row["bytes"] / row["count"]), f"{row['count']:,}",
            seconds_text(row["mean_s"]), seconds_text(row["min_s"]), seconds_text(row["max_s"]),
            share_text(exposed), f"{bytes_text(speed)}" if speed else "-",
            share_text(ratio) if ratio else "-",
        )  # fmt: skip
    return table


def _links(document: Document, pretty: bool) -> Table:
    table = _table(pretty)
    left = ("link from", "to")
    for name in (*left, "per step", "in use", "speed in use"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for way in document["calibration"]["used"][:_WAYS]:
        speed = f"{bytes_text(way['bytes_per_s'])}/s"
        table.add_row(
            *way["hosts"], bytes_text(way["bytes_per_step"]), share_text(way["in_use"]), speed
        )
    return table


def _helpers(document: Document, pretty: bool) -> Table:
    table = _table(pretty)
    left = ("helper (extra hardware)", "state")
    for name in (*left, *_SHARES, "leases", "validation", "duplicates", "lost"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in document["offload"]["helpers"][:_HELPERS]:
        shares = (_share(row["busy_share"]), _share(row["waited_share"]))
        counts = (row["leases"], row["evaluated"], row["duplicates"], row["lost"])
        table.add_row(row["name"], row["state"], *shares, *(f"{count:,}" for count in counts))
    return table


def _supplied(row: Supply) -> str:
    waits = "-" if row["waited_s"] is None else seconds_text(row["waited_s"])
    return (
        f"rank {row['rank']} waits {waits} per batch for helpers; {_plain(row['occupancy'])} of "
        f"{_plain(row['depth'])} batches were ready when it asked, {row['own']:,} of {row['batches']:,} it "
        "made itself"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else share_text(value)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def show_comparison(found: Comparison, console: Console) -> None:
    """Print what differs between two runs."""
    console.print(
        Text(found["verdict"]["text"], style=_STYLES[found["verdict"]["level"]]), soft_wrap=True
    )
    pretty = console.is_terminal
    for title, rows in (
        ("figures", found["figures"]), ("computing per step", found["phases"]),
        ("exposed communication per step", found["tags"]),
        ("communication per step and rank", found["operations"][:_OPERATIONS]),
    ):  # fmt: skip
        if rows:
            console.print(_changes(title, rows, found, pretty))
    for side, only in ((found["a"], found["only_a"]), (found["b"], found["only_b"])):
        for finding in only:
            _line(console, f"only in {side['title']}: {finding['title']}", "bold")
    if found["differences"]:
        table = _table(pretty)
        for name in ("configured otherwise", found["a"]["title"], found["b"]["title"]):
            table.add_column(name, overflow="fold")
        for row in found["differences"]:
            table.add_row(
                Text(f"{row['section']} {row['key']}"),
                Text(_value(row["a"])),
                Text(_value(row["b"])),
            )
        console.print(table)
    else:
        _line(console, "plan, environment and versions are the same")
    for document in found["documents"]:
        for problem in document["problems"]:
            _line(console, f"note: {document['run']['title']}: {problem}", "yellow")


def _changes(title: str, rows: list[Change], found: Comparison, pretty: bool) -> Table:
    table = _table(pretty)
    table.add_column(title, no_wrap=True)
    for name in (f"A: {found['a']['title']}", f"B: {found['b']['title']}", "change", "B/A"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        unit = row.get("unit", "s")
        change, ratio = row["change"], row["ratio"]
        sign = "+" if change is not None and change > 0 else ""
        table.add_row(
            Text(row["name"]), _figure(row["a"], unit), _figure(row["b"], unit),
            sign + _figure(change, unit) if change is not None else "-",
            f"{ratio:.2f}" if ratio is not None else "-",
        )  # fmt: skip
    return table


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return seconds_text(value)
    if unit == "share":
        return share_text(value)
    return bytes_text(value) if unit == "bytes" else f"{value:,.4g}"


def _value(value: object) -> str:
    return "-" if value is None else str(value)


def _table(pretty: bool) -> Table:
    return Table(box=box.SIMPLE_HEAD if pretty else None, pad_edge=False, header_style="bold")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
