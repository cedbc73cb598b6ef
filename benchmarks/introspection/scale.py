"""How long a report of many ranks takes, and how large it is: synthetic traces of a job with one late rank.

    python benchmarks/introspection/scale.py

writes traces of 1,024 ranks (about 1 GB) to a temporary folder, reads them in a fresh process, several times,
and prints the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOAL_S, GOAL_BYTES = 5.0, 10_000_000
_PARTS = ("read", "judge", "page")


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(run: Path) -> dict[str, float | str]:
    """Seconds of the parts, and bytes, in this process."""
    from fivefold.introspect.document import document
    from fivefold.introspect.page import html
    from fivefold.introspect.run import TracedRun

    begin = time.perf_counter()
    traces = TracedRun.load(run)
    read = time.perf_counter()
    made = document(traces)
    judged = time.perf_counter()
    page = html(made)
    return {
        "read": read - begin, "judge": judged - read, "page": time.perf_counter() - judged,
        "json_bytes": len(json.dumps(made)), "page_bytes": len(page.encode()),
        "verdict": made["verdict"]["text"],
    }  # fmt: skip


def main() -> int:
    """Measure, and print."""
    asked = options()
    if asked.read:
        print(json.dumps(measured(asked.read)))
        return 0
    sys.path.append(str(ROOT / "tests"))
    from traces import Story

    with tempfile.TemporaryDirectory() as folder:
        story = Story(ranks=asked.ranks, steps=asked.steps, tiny=3, per_node=8)
        run = story.slow_loader(asked.ranks - 1).write(Path(folder))
        size = sum(path.stat().st_size for path in run.rglob("*.trace"))
        rounds = [
            json.loads(subprocess.run(
                [sys.executable, __file__, "--read", str(run)], check=True, capture_output=True, text=True
            ).stdout)
            for _ in range(asked.rounds)
        ]  # fmt: skip
    told(asked, rounds, size)
    return 0


def told(asked: argparse.Namespace, rounds: list[dict[str, float]], size: int) -> None:
    """The table."""
    medians = {part: statistics.median(row[part] for row in rounds) for part in _PARTS}
    total = statistics.median(sum(row[part] for part in _PARTS) for row in rounds)
    page = int(rounds[0]["page_bytes"])
    print(
        f"{asked.ranks} ranks, {asked.steps} steps, {size / 1e6:,.0f} MB of traces; {asked.rounds} rounds"
    )
    print("| read | judge | page | all | JSON | page |\n|---|---|---|---|---|---|")
    cells = [f"{medians[part]:.2f} s" for part in _PARTS]
    cells += [f"{total:.2f} s", f"{rounds[0]['json_bytes'] / 1e6:.1f} MB", f"{page / 1e6:.1f} MB"]
    print("| " + " | ".join(cells) + " |")
    print(rounds[0]["verdict"])
    met = "met" if page < GOAL_BYTES else "missed"
    print(f"Goal, a page below {GOAL_BYTES / 1e6:.0f} MB: {met}")
    print(f"Goal, at most {GOAL_S:.0f} s in all: {'met' if total <= GOAL_S else 'missed'}")


if __name__ == "__main__":
    sys.exit(main())
