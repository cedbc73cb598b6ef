"""Pages of reports, and a browser to look at them; made only for tests that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reports
from browser import Open, Tab, chromium, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Benchmarks that are run small do not wait until the other tests leave the cores alone.
os.environ.setdefault("BENCHMARK_PATIENCE_S", "0")


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
