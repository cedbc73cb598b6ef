"""What came of campaigns of random nets: shares of outcomes by layout and by feature.

make fuzz FUZZ_FLAGS="--seed 1 --json one.json"
python benchmarks/exactness/random_nets.py one.json two.json three.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from page import circumstances, keep

OUTCOMES = ("exact", "refused", "told", "wrong", "traceback", "crash", "hang")


def added(reports: list[dict[str, Any]], key: str) -> dict[str, Counter[str]]:
    """Outcomes by name, of all reports."""
    found: dict[str, Counter[str]] = {}
    for report in reports:
        for name, outcomes in report[key].items():
            found.setdefault(name, Counter()).update(outcomes)
    return dict(sorted(found.items()))


def table(what: str, rows: dict[str, Counter[str]]) -> str:
    """A row for every name: cases, and the shares of outcomes."""
    lines = [f"| {what} | cases | exact | refused | told | others |", "|---|---|---|---|---|---|"]
    for name, outcomes in rows.items():
        count = outcomes.total()
        shares = [f"{100 * outcomes[o] / count:.0f} %" for o in OUTCOMES[:3]]
        others = ", ".join(f"{outcomes[o]} {o}" for o in OUTCOMES[3:] if outcomes[o]) or "0"
        lines.append(f"| {name} | {count} | {' | '.join(shares)} | {others} |")
    return "\n".join(lines)


def main(files: list[str]) -> None:
    """Read the reports, and show them in README.md."""
    reports = [json.loads(Path(file).read_text()) for file in files]
    commits = sorted({report["commit"] for report in reports})
    by_seed = {
        f"seed {report['seed']}": Counter({o: report["outcomes"][o] for o in OUTCOMES})
        for report in reports
    }
    by_layout, by_tag = added(reports, "by_layout"), added(reports, "by_tag")
    result = {
        "environment": {**circumstances(), "commit": ", ".join(commits)},
        "by_seed": {name: dict(found) for name, found in by_seed.items()},
        "by_layout": {name: dict(found) for name, found in by_layout.items()},
        "by_feature": {name: dict(found) for name, found in by_tag.items()},
    }
    shown = "\n\n".join(
        [
            table("campaign", by_seed),
            table("layout and schedule", by_layout),
            "<details><summary>By feature; a case has several</summary>",
            table("feature", by_tag),
            "</details>",
        ]
    )
    keep("random_nets", result, shown)


if __name__ == "__main__":
    main(sys.argv[1:])
