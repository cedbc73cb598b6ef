"""The page of a report in a real browser: what a reader clicks, types and sees.

FIVEFOLD_SCREENSHOTS=docs/images pytest tests/cli/test_report_page.py    takes the documentation's pictures
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reports
from browser import Tab, chromium, picture
from fivefold.introspect.page import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return reports.report(folder / "resnet20-digits")


@pytest.fixture(scope="module")
def report(folder: Path, document: dict[str, Any]) -> Path:
    return written(folder / "report.html", document)


@pytest.fixture(scope="module")
def compared(folder: Path) -> Path:
    return written(folder / "compare.html", reports.comparison(folder))


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    tabs: list[Tab] = []

    def go(where: Path | str, **how: Any) -> Page:
        tabs.append(Tab(browser, **how))
        return tabs[-1].open(where)

    yield go
    for tab in tabs:
        tab.close()


def written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(html(document), encoding="utf-8")
    return path


def column(page: Page, label: str, number: int) -> list[str]:
    rows = page.locator(f"[aria-label='{label}'] tbody tr")
    return [row.locator("th, td").nth(number).inner_text() for row in rows.all()]


def on_screen(place: Locator) -> bool:
    box = place.bounding_box()
    return box is not None and -5 < box["y"] < 850


# --- what a reader sees first ---------------------------------------------------------------------


def test_the_verdict_comes_first(opened: Open, report: Path, document: dict[str, Any]) -> None:
    page = opened(report)
    assert page.locator("h1").inner_text() == document["verdict"]["text"]
    assert on_screen(page.locator("h1"))
    assert page.locator(".finding").count() == len(document["findings"]) >= 2
    assert page.title() == "resnet20-digits - Fivefold"
    picture(page, "report")
    sections = page.locator("section[id^='s-']")
    shown = [s.get_attribute("id") for s in sections.all() if s.is_visible()]
    assert {"s-timeline", "s-heat", "s-operations", "s-calibration", "s-series", "s-stacks"} <= set(
        shown
    )
    for place in page.locator("section[id^='s-'] .canvas").all():
        if place.is_visible():
            assert place.locator("canvas").count() == 1


def test_a_finding_leads_to_its_evidence(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator(".finding .headline").first.click()
    heat = page.locator("#s-heat")
    assert "lit" in (heat.get_attribute("class") or "")
    assert on_screen(heat.locator("h2"))
    assert heat.locator(".names .loud").inner_text() == "▶ 3"
    page.locator(
        ".finding[data-id=straggler] .evidence button", has_text="where threads are"
    ).click()
    assert on_screen(page.locator("#s-stacks h2"))
    assert page.locator("#s-stacks select").input_value() == "3"
    assert "dataset.py:18 __getitem__ (time.sleep)" in page.locator("#s-stacks").inner_text()
    page.locator(".finding[data-id=exposed] .evidence button", has_text="operations").click()
    assert page.locator("#s-operations select").first.input_value() == "parameters and gradients"
    lit = page.locator("#s-operations tr.lit")
    assert lit.count() == 2 and on_screen(lit.first)
    page.locator(
        ".finding[data-id=straggler] .evidence button", has_text=re.compile("^ranks of it")
    ).click()
    assert page.locator("#s-ranks tr.lit th").inner_text() == "3"


# --- steps: zoom, ranks ---------------------------------------------------------------------------


def zoomed(page: Page) -> list[float]:
    told = page.locator("#s-timeline .chart").get_attribute("data-zoomed") or ""
    return [float(word) for word in told.split()]


def drag(page: Page, begin: float, end: float) -> None:
    plane = page.locator("#s-timeline .u-over")
    plane.scroll_into_view_if_needed()
    box = plane.bounding_box()
    assert box
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 90, steps=5)
    page.mouse.up()


def test_dragging_zooms_into_steps(opened: Open, report: Path) -> None:
    page = opened(report)
    assert zoomed(page) == []
    drag(page, 0.25, 0.5)
    first, last = zoomed(page)
    assert first == pytest.approx(60, abs=2) and last == pytest.approx(120, abs=2)
    page.mouse.move(5, 5)
    assert re.search(r"step (59|60|61) to", page.locator("#s-timeline .where").inner_text())
    page.locator("#s-timeline .tools button", has_text="+").click()
    closer = zoomed(page)
    assert closer[1] - closer[0] == pytest.approx((last - first) / 2, rel=0.1)
    page.locator("#s-timeline .reset").click()
    assert zoomed(page) == []
    assert page.locator("#s-timeline .reset").is_disabled()


def test_the_chart_obeys_keys(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator("#s-timeline .chart").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#s-timeline .where").inner_text() == "step 2"
    page.keyboard.press("+")
    assert len(zoomed(page)) == 2
    page.keyboard.press("Escape")
    assert zoomed(page) == []


def test_values_in_the_legend_are_those_of_the_document(
    opened: Open, report: Path, document: dict[str, Any]
) -> None:
    page = opened(report)
    page.locator("#s-timeline select").first.select_option("2")
    page.locator("#s-timeline .chart").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    told = dict(
        line.rsplit("\n", 1)
        for line in (li.inner_text() for li in page.locator("#s-timeline .legend li").all())
    )
    step = document["timeline"]["ranks"]["2"]["phase_s"]["forward"][7]
    assert float(told["forward"].removesuffix(" ms")) == pytest.approx(step * 1e3, rel=0.01)


def test_the_heat_map_chooses_a_rank_by_key_and_by_click(opened: Open, report: Path) -> None:
    page = opened(report)
    canvas = page.locator("#s-heat canvas")
    canvas.focus()
    said = page.locator("#s-heat .said")
    assert said.inner_text().startswith("rank 0, step 0: later than the median by")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "End"):
        page.keyboard.press(key)
    assert said.inner_text().startswith("rank 3, step 239: later than the median by")
    page.keyboard.press("Enter")
    assert page.locator("#s-timeline select").first.input_value() == "3"
    assert page.locator("#s-ranks .card h3").inner_text() == "Rank 3"
    box = canvas.bounding_box()
    assert box
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] * 0.4})
    assert page.locator("#s-timeline select").first.input_value() == "1"
    page.locator("#s-heat select").select_option("exposed_s")
    canvas.focus()
    assert "exposed" in said.inner_text()


# --- tables ---------------------------------------------------------------------------------------

UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def in_seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * UNITS[unit]


def test_tables_sort_by_clicks_and_keys(opened: Open, report: Path) -> None:
    page = opened(report)
    heads = page.locator("[aria-label='Operations by size'] thead th")
    names = [head.inner_text().strip() for head in heads.all()]
    average = names.index("average")
    head = heads.nth(average).locator("button")
    head.click()
    assert heads.nth(average).get_attribute("aria-sort") == "descending"
    falling = [in_seconds(t) for t in column(page, "Operations by size", average)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 3
    head.focus()
    page.keyboard.press("Enter")
    assert heads.nth(average).get_attribute("aria-sort") == "ascending"
    assert [in_seconds(t) for t in column(page, "Operations by size", average)] == falling[::-1]


def test_operations_are_chosen_by_tag(opened: Open, report: Path, document: dict[str, Any]) -> None:
    page = opened(report)
    operations = page.locator("#s-operations")
    operations.locator("select").first.select_option("batch-norm statistics")
    assert set(column(page, "Operations by size", 1)) == {"batch-norm statistics"}
    calls = sum(o["count"] for o in document["operations"] if o["tag"] == "batch-norm statistics")
    assert calls == 4 * 240 * 3
    assert operations.locator(".facts dd").first.inner_text() == f"{calls:,}"
    assert operations.locator(".chart").first.get_attribute("data-points") == "2"


def test_configuration_is_filtered(opened: Open, report: Path) -> None:
    page = opened(report)
    before = len(column(page, "Configuration", 1))
    page.get_by_label("Filter configuration").fill("workers")
    assert column(page, "Configuration", 1) == ["data.workers"]
    assert column(page, "Configuration", 3) == ["default"]
    page.get_by_label("without defaults").check()
    assert "Nothing matches" in page.locator("#s-configuration tbody").inner_text()
    page.get_by_label("Filter configuration").fill("")
    assert 0 < len(column(page, "Configuration", 1)) < before


# --- keyboard, phone, dark ------------------------------------------------------------------------


def test_everything_is_reached_by_the_keyboard(opened: Open, report: Path) -> None:
    page = opened(report)
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the report"
    page.keyboard.press("Tab")
    assert "headline" in (page.locator(":focus").get_attribute("class") or "")
    assert page.locator(":focus").evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator(":focus").get_attribute("id") == "h-heat"
    page.keyboard.press("Tab")
    assert page.locator("#s-heat select:focus").count() == 1
    unreachable = page.locator("button, select, input, canvas[role], a[href]").evaluate_all(
        "nodes => nodes.filter(n => n.tabIndex < 0 && !n.disabled).length"
    )
    assert unreachable == 0
    nameless = page.locator(
        "button, select, input, canvas[role], section, figure, nav"
    ).evaluate_all(
        "nodes => nodes.filter(n => !(n.ariaLabel || n.labels?.length || n.innerText?.trim() || "
        "n.getAttribute('aria-labelledby') || n.closest('[hidden]'))).map(n => n.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_width_needs_sideways_scrolling(
    opened: Open, report: Path, compared: Path, width: int, dark: bool
) -> None:
    for where in (report, compared):
        page = opened(where, width=width, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
        if where == report and (width, dark) in ((390, False), (1280, True)):
            picture(page, "report-phone" if width == 390 else "report-dark")


def test_colours_change_with_the_system(opened: Open, report: Path) -> None:
    page = opened(report)
    axis = "ink('--soft')"
    light = page.evaluate(axis)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(axis) != light
    page.locator("#s-timeline canvas").first.wait_for()


# --- two runs -------------------------------------------------------------------------------------


def test_two_runs_are_compared(opened: Open, compared: Path) -> None:
    page = opened(compared)
    assert page.locator("h1").inner_text().startswith("Steps of four-workers take")
    picture(page, "compare")
    differences = column(page, "Values that differ", 1)
    assert "data.workers" in differences
    row = differences.index("data.workers")
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


def test_a_run_that_has_just_begun_has_a_page(opened: Open, folder: Path) -> None:
    story = reports.busy(ranks=1, steps=1)
    page = opened(written(folder / "begun.html", reports.report(folder / "begun", story)))
    assert page.locator("h1").inner_text()
    empty: Any = json.loads(json.dumps(reports.report(folder / "begun", story)))
    for part in ("breakdown", "operations", "marks", "findings"):
        empty[part] = []
    empty["steady"] = None
    opened(written(folder / "empty.html", empty))
