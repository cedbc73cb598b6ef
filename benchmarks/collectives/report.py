"""Tables and goals of the collectives, out of the kept results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Median, ratio, table
from publishing import Page

from fivefold.bench.report import size_text

K, M = 1 << 10, 1 << 20
SIZES = (4, 4 * K, 16 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M)
ORDER = ("allreduce", "in-c", "four-ranks", "others", "p2p", "steps")

# (part, contender, baselines of which the better counts, sizes, least ratio of their times)
GOALS = [
    ("allreduce", "fivefold", ("gloo",), (4,), 15.0),
    ("allreduce", "fivefold", ("gloo",), (4 * K, 16 * K, 64 * K), 25.0),
    ("allreduce", "fivefold", ("gloo",), (M, 4 * M, 16 * M), 8.0),
    ("allreduce", "fivefold", ("gloo",), (64 * M,), 7.0),
    ("allreduce", "fivefold", ("openmpi", "mpich"), (64 * K, 256 * K, M, 4 * M, 16 * M), 1.2),
    ("allreduce", "fivefold", ("openmpi", "mpich"), (64 * M,), 3.0),
    ("allreduce", "fivefold-arena", ("openmpi", "mpich"), (64 * K, M, 16 * M, 64 * M), 4.0),
    ("allreduce", "fivefold", ("stream",), (16 * M,), 0.35),
    ("allreduce", "fivefold", ("stream",), (64 * M,), 0.6),
    *(("in-c", "core", ("openmpi", "mpich"), (size,), 1.0) for size in SIZES),
    ("four-ranks", "fivefold", ("openmpi",), (4, 4 * K, 64 * K), 1 / 1.5),
    ("four-ranks", "fivefold", ("openmpi",), (256 * K, M, 16 * M), 1.0),
    ("p2p", "fivefold", ("gloo",), (4 * K, 64 * K), 1.0),
]


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    lines = [f"### {result['part']}: {result['ranks']} ranks", ""]
    for operation, by_contender in result["seconds"].items():
        if operation != "stream":
            lines += [_table(result, operation, by_contender), ""]
    if result["part"] == "steps":
        lines += [_shares(result), ""]
    for goal in _judged(result):
        lines += [goal, ""]
    where = result["environment"]
    lines.append(
        f"{where['cpu']}, {where['cores']} cores; Python {where['python']}, Linux {where['kernel']}; commit "
        f"{where['commit']}, {where['date']}; {result['rounds']} rounds."
    )
    return "\n".join(lines)


def _table(result: dict[str, Any], operation: str, seconds: dict[str, Any]) -> str:
    first, *others = seconds
    what = "model" if result["part"] == "steps" else "bytes"
    header = [f"{operation}, {what}", *(f"{name}, us" for name in seconds)]
    header += [f"{name} : {first}" for name in others]
    rows: list[list[str]] = []
    for at, size in enumerate(result["sizes"]):
        times = [f"{1e6 * Median.of(rounds[at]).value:.1f}" for rounds in seconds.values()]
        ratios = [str(ratio(seconds[name][at], seconds[first][at])) for name in others]
        rows.append([size if isinstance(size, str) else size_text(size), *times, *ratios])
    return table(header, rows)


def _shares(result: dict[str, Any]) -> str:
    """How much of a step is communication: what it takes beyond the same step without."""
    seconds = result["seconds"]["step"]
    names = [name for name in seconds if name != "alone"]
    rows: list[list[str]] = []
    for at, model in enumerate(result["sizes"]):
        alone = seconds["alone"][at]
        shares = [1 - ratio(alone, seconds[name][at]).value for name in names]
        rows.append([str(model), *(f"{100 * share:.0f} %" for share in shares)])
    return table(["communication, share of a step", *names], rows)


def _judged(result: dict[str, Any]) -> Iterator[str]:
    if result["part"] in ("others", "steps"):
        return
    operation = "p2p" if result["part"] == "p2p" else "allreduce"
    seconds = result["seconds"][operation]
    limit = next(iter(result["seconds"].get("stream", {}).values()), None)
    for part, name, baselines, sizes, least in GOALS:
        if part != result["part"]:
            continue
        for size in (size for size in sizes if size in result["sizes"]):
            at = result["sizes"].index(size)
            against = [limit if b == "stream" else seconds[b] for b in baselines]
            best = [min(rounds) for rounds in zip(*(b[at] for b in against), strict=True)]
            times = ratio(best, seconds[name][at])
            verdict = times.at_least(least)
            yield (
                f"Goal, {name} at {size_text(size)}, {' or '.join(baselines)} take at least {least:.2f} "
                f"times as long: {times}: {verdict}."
            )


PAGE = Page(Path(__file__).resolve().parent, section, ORDER)
