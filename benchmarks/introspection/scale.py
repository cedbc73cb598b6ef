"""How long a report of many ranks takes, and how large it is: synthetic traces of a job with one late rank.

    python benchmarks/introspection/scale.py

writes traces of 1,024 ranks (about 1 GB) to a temporary folder, reads them in a fresh process in every round,
opens the page as often in the system's Chromium, prints the table, keeps the result and renews README.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment
from report import HERE, PAGE, TIMES
from rounds import undisturbed


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    parser.add_argument("--read", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print, keep; the exit code."""
    asked = options()
    if asked.read:
        print(json.dumps(reported(*asked.read)))
        return 0
    return PAGE.publish(["scale"], lambda _: measured(asked), asked.results)


def reported(run: Path, out: Path) -> dict[str, float | str]:
    """Seconds of the parts, and bytes, in this process; the page is written to `out`."""
    from fivefold.introspect.document import document
    from fivefold.introspect.page import html
    from fivefold.introspect.run import TracedRun

    begin = time.perf_counter()
    traces = TracedRun.load(run)
    read = time.perf_counter()
    made = document(traces)
    judged = time.perf_counter()
    page = html(made)
    done = time.perf_counter()
    out.write_text(page, encoding="utf-8")
    return {
        "read": read - begin, "judge": judged - read, "page": done - judged,
        "json_bytes": len(json.dumps(made)), "page_bytes": len(page.encode()),
        "verdict": made["verdict"]["text"],
    }  # fmt: skip


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part of a report, by round."""
    sys.path.append(str(HERE.parents[1] / "tests"))
    from traces import Story

    before = environment()
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        story = Story(ranks=asked.ranks, steps=asked.steps, tiny=3, per_node=8)
        run = story.slow_loader(asked.ranks - 1).write(Path(folder))
        size = sum(path.stat().st_size for path in run.rglob("*.trace"))
        answers, others = undisturbed({"report": run}, asked.rounds, anew, told, own_s)
        # Afterwards: what Chromium's processes use is not told to this one, and would pass for others'.
        opened = [opened_s(page_of(run)) for _ in range(asked.rounds)]
    rounds = answers["report"]
    seconds = {name: [found[name] for found in rounds] for name in TIMES} | {"open": opened}
    return {
        "benchmark": "scale", "ranks": asked.ranks, "steps": asked.steps, "rounds": asked.rounds,
        "trace_bytes": size, **{name: rounds[0][name] for name in ("json_bytes", "page_bytes", "verdict")},
        "seconds": {name: [round(each, 4) for each in took] for name, took in seconds.items()},
        "environment": {**before, "torch": version("torch"), **others.told()},
    }  # fmt: skip


def anew(run: Path) -> dict[str, Any]:
    """A report in a fresh process."""
    words = [sys.executable, __file__, "--read", str(run), str(page_of(run))]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


def page_of(run: Path) -> Path:
    """Where the page of a run goes."""
    return run.parent / "report.html"


def opened_s(page: Path) -> float:
    """Seconds from going to a page until it is drawn, in Chromium, whose own start is not counted."""
    from playwright.sync_api import sync_playwright

    browsers = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    path = next(browsers, None)
    if path is None:
        raise SystemExit("the page is opened in Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Without its sandbox, which root may not use; the page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page()
        begin = time.perf_counter()
        tab.goto(page.as_uri())
        tab.locator("body[data-ready]").wait_for()
        took_s = time.perf_counter() - begin
        browser.close()
    return took_s


def own_s() -> float:
    """Processor time of this process and of the reports that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def told(done: int, answers: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """A line after each round."""
    latest = answers["report"][-1]
    return f"round {done}: " + "  ".join(f"{name} {latest[name]:.2f} s" for name in TIMES)


if __name__ == "__main__":
    sys.exit(main())
