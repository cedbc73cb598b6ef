"""The page of a report in a real browser: what a reader clicks, types and sees.

FIVEFOLD_SCREENSHOTS=docs/images pytest tests/cli -k report_page    takes the documentation's pictures
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from browser import Open, column, drag, on_screen, picture, zoomed

# --- what a reader sees first ---------------------------------------------------------------------


def test_the_verdict_comes_first(opened: Open, report: Path, document: dict[str, Any]) -> None:
    page = opened(report)
    told = page.locator("h1").inner_text().replace("\u00a0", " ")
    assert told == document["verdict"]["text"]
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('parallel.batch_norm = "replica" needs', 'parallel.batch_norm = "replica" needs'),
        ("DistributedDataParallel(x=False), where", "DistributedDataParallel(x=False), where"),
        ("larger shares per rank. Or", "Larger shares per rank. Or"),
    ],
)
def test_a_sentence_begins_large_unless_with_a_key(
    text: str, shown: str, opened: Open, report: Path
) -> None:
    assert opened(report).evaluate("text => sentence(text)", text) == shown


# --- steps: zoom, ranks ---------------------------------------------------------------------------


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
    page.mouse.move(5, 5)
    page.locator("#s-timeline").evaluate("node => node.scrollIntoView()")
    picture(page, "report-steps")
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
    page.locator("#s-operations").evaluate("node => node.scrollIntoView()")
    picture(page, "report-operations")
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
    assert column(page, "Configuration", 1) == ["loader.workers"]
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


@pytest.mark.long(every=8)
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
