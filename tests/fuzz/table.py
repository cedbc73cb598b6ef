"""The report of a campaign as text."""

from __future__ import annotations

from typing import Any

from fuzz.compare import BAD, OUTCOMES

__all__ = ["table"]


def table(report: dict[str, Any]) -> str:
    """Outcomes in all, by layout, and by those features where something is bad or much is refused."""
    count = max(report["cases"], 1)
    lines = ["", _row("by layout", OUTCOMES)]
    for name, found in report["by_layout"].items():
        lines.append(_row(name, [found.get(o, 0) for o in OUTCOMES]))
    worst = {
        name: found for name, found in report["by_tag"].items() if any(found.get(o) for o in BAD)
    }
    if worst:
        lines += ["", _row("by feature, where bad", OUTCOMES)]
        by_share = sorted(worst, key=lambda n: -_share(worst[n]))
        lines += [_row(n, [worst[n].get(o, 0) for o in OUTCOMES]) for n in by_share[:40]]
    if report["refused"]:
        lines += ["", "refused most often"]
        top = list(report["refused"].items())[:12]
        lines += [f"{number:6}  {text}" for text, number in top]
    for one in report["bad"]:
        if one["file"]:
            lines.append(f"{one['kind']}: {one['file']}: {one['text'][:110]}")
    lines += ["", _row("all", OUTCOMES), _row("", [report["outcomes"][o] for o in OUTCOMES])]
    lines.append(_row("", [f"{100 * report['outcomes'][o] / count:.1f} %" for o in OUTCOMES]))
    lines.append(
        f"{count} cases of seed {report['seed']} in {report['seconds']:.0f} s, "
        f"{report['seconds'] / count:.2f} s each; {report['rejected']} were not valid in one process"
    )
    return "\n".join(lines)


def _share(found: dict[str, int]) -> float:
    return sum(found.get(o, 0) for o in BAD) / sum(found.values())


def _row(name: str, cells: Any) -> str:
    return f"{name[:34]:34}" + "".join(f"{cell!s:>10}" for cell in cells)
