"""Pages in a real browser: two runs, hostile traces, a thousand ranks, a run that goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reports
from browser import Open, Tab, column, drag, picture, written, zoomed
from commands import python
from fivefold.introspect.page import html
from fivefold.launch.environment import without_places

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_runs_are_compared(opened: Open, compared: Path) -> None:
    page = opened(compared)
    assert page.locator("h1").inner_text().startswith("Steps of four-workers take")
    picture(page, "compare")
    differences = column(page, "Values that differ", 1)
    assert "loader.workers" in differences
    row = differences.index("loader.workers")
    assert (
        column(page, "Values that differ", 2)[row],
        column(page, "Values that differ", 4)[row],
    ) == ("0", "4")
    changes = dict(
        zip(
            column(page, "Work by phase, per step", 0),
            column(page, "Work by phase, per step", 3),
            strict=True,
        )
    )
    assert changes["load"].startswith("−") and changes["load"].endswith("ms")
    page.get_by_role("button", name="Open the report of A").click()
    assert "rank 3 arrives" in page.locator("h1:visible").inner_text()
    page.locator("#s-heat canvas").focus()
    page.get_by_role("button", name="both runs").click()
    page.get_by_role("button", name="Open the report of B").click()
    assert "rank 3 arrives" not in page.locator("h1:visible").inner_text()


# --- what traces say is text ----------------------------------------------------------------------

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)


def test_nothing_in_a_trace_is_taken_for_html(opened: Open, folder: Path) -> None:
    story = reports.busy(steps=20)
    story.meta |= {
        "host": EVIL, "command": ["train.py", EVIL, "<!--"], "backend": EVIL, "coordinates": {EVIL: 1},
        "environment": {"FIVEFOLD_X": EVIL}, "plan": {EVIL: {"value": EVIL, "origin": EVIL}},
        "versions": {"torch": EVIL},
    }  # fmt: skip
    story.notes += [
        {"kind": "warning", "at_ns": 10**12, "text": EVIL},
        {"kind": "metric", "step": 3, "name": EVIL, "value": 1.0, "at_ns": 10**12},
    ]
    state = {"rank": 1, "phase": EVIL, "op": EVIL, "number": 1, "since_s": 2.0, "stack": [EVIL]}
    story.notes += [
        {
            "kind": "hang",
            "at_ns": 10**12,
            "text": EVIL,
            "waiting": [0],
            "missing": [1],
            "states": [state],
        }
    ]
    story.stacks = {3: {"load": [(EVIL, 9)]}}
    path = written(
        folder / "evil.html", reports.report(folder / "<img src=x onerror=alert(1)>", story)
    )
    assert EVIL not in path.read_text()
    page = opened(path)
    assert page.title() == "<img src=x onerror=alert(1)> - Fivefold"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    for section in ("ranks", "configuration", "stacks", "marks", "series"):
        assert "onerror=" in page.locator(f"#s-{section}").inner_text(), section


def test_the_page_may_ask_nobody(browser: Browser, report: Path) -> None:
    text = report.read_text()
    assert not re.search(r"<link[^>]+href=.https?:|src=.https?:|@import|url\(http", text)
    tab = Tab(browser)
    page = tab.open(report)
    rules = page.locator("meta[http-equiv]").get_attribute("content") or ""
    assert "default-src 'none'" in rules and "unsafe" not in rules and "connect-src" not in rules
    tried = "fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')"
    assert page.evaluate(tried) == "refused"
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))"
    )
    assert page.evaluate("typeof ran") == "undefined"
    assert len(tab.complaints) >= 2
    assert all("Content Security Policy" in told for told in tab.complaints)
    tab.complaints.clear()
    tab.asked = [url for url in tab.asked if url.startswith("file:")]
    tab.close()


def test_damaged_figures_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant"):
        html(document | {"throughput": {"samples_per_s": float("nan")}})


# --- many ranks -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_thousand_ranks_open(opened: Open, folder: Path) -> None:
    found = reports.report(folder / "many", reports.busy(ranks=1024, steps=100, late=517))
    path = written(folder / "many.html", found)
    assert path.stat().st_size < 10e6
    page = opened(path)
    rows = page.locator("#s-heat .heat").get_attribute("data-rows")
    assert rows is not None and 64 < int(rows) <= 256
    loud = page.locator("#s-heat .names .loud").all_inner_texts()
    assert len(loud) == 1
    first, last = map(int, re.findall(r"\d+", loud[0]))
    assert first <= 517 <= last
    page.locator("#s-heat").evaluate("node => node.scrollIntoView()")
    picture(page, "report-1024")
    canvas = page.locator("#s-heat canvas")
    box = canvas.bounding_box()
    assert box
    canvas.click(position={"x": 200, "y": box["height"] * (517.5 / 1024)})
    assert page.locator("#s-timeline select").first.input_value() == "517"
    page.get_by_label("Filter ranks").fill("517")
    assert column(page, "Ranks", 0) == ["517"]
    page.get_by_label("Filter ranks").fill("")
    page.locator("#s-ranks .more").click()
    assert page.locator("[aria-label='Ranks'] tbody tr").count() == 1024


# --- a run that goes on ---------------------------------------------------------------------------


@contextmanager
def started(*words: object, cwd: Path) -> Generator[subprocess.Popen[str]]:
    """`fivefold WORDS`, ended with all that it has started."""
    process = subprocess.Popen(
        [python(), "-m", "fivefold", *map(str, words)],
        cwd=cwd,
        env={k: v for k, v in without_places(os.environ).items() if not k.startswith("FIVEFOLD_")}
        | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def eventually(true: Callable[[], bool], page: Page, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, page.locator(".banner").inner_text()
        page.wait_for_timeout(100)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_live_run_is_followed(opened: Open, tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    run = tmp_path / "runs" / "digits-001"
    with started("train", "digits", "-n", 2, "--epochs", 200, cwd=tmp_path) as training:
        until = time.monotonic() + 60
        while len(list(run.glob("trace/*.trace"))) != 2:
            assert time.monotonic() < until and training.poll() is None
            time.sleep(0.1)
        with started("report", run, "--serve", "--port", 0, cwd=tmp_path) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            page = opened(address)
            assert "token" not in page.url
            updates = page.locator("body")
            steps = page.locator(".facts").first.locator("div").last.locator("dd")

            def number() -> int:
                return int(steps.inner_text().replace(",", ""))

            eventually(lambda: steps.count() == 1 and number() > 8, page)
            assert page.locator(".state").inner_text() == "running"
            assert page.locator(".live .dot.on").count() == 1
            drag(page, 0.0, 0.4)
            chosen, before = zoomed(page), number()
            assert chosen
            page.get_by_label("Filter configuration").fill("epochs")
            eventually(lambda: number() > before, page)
            assert int(updates.get_attribute("data-updates") or 0) >= 2
            assert zoomed(page) == chosen, "the reader's zoom is kept"
            assert page.get_by_label("Filter configuration").input_value() == "epochs"
            assert all("epochs" in name for name in column(page, "Configuration", 1))
            page.locator("h1").first.hover()
            page.mouse.down()
            held = updates.get_attribute("data-updates")
            page.wait_for_timeout(5000)
            assert updates.get_attribute("data-updates") == held, "what is dragged is not replaced"
            page.mouse.up()
            eventually(lambda: updates.get_attribute("data-updates") != held, page)
            training.send_signal(signal.SIGINT)
            training.wait(60)
            # A browser that shares two cores with other tests may be far behind.
            eventually(lambda: page.locator(".state").inner_text() != "running", page, 150)
            page.close()  # before its server is gone


def test_a_run_that_has_just_begun_has_a_page(opened: Open, folder: Path) -> None:
    story = reports.busy(ranks=1, steps=1)
    page = opened(written(folder / "begun.html", reports.report(folder / "begun", story)))
    assert page.locator("h1").inner_text()
    empty: Any = json.loads(json.dumps(reports.report(folder / "begun", story)))
    for part in ("breakdown", "operations", "marks", "findings"):
        empty[part] = []
    empty["steady"] = None
    opened(written(folder / "empty.html", empty))
